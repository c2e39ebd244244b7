// Protection domains, thread domains and parent domains: allocation and deallocation.

#include "ibverbs/protection_domain.hpp"

#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

struct ThreadDomain {
    ibv_td public_td{};
    // Number of live parent domains that were made with the thread domain.
    std::atomic<int> user_count{0};
};

ThreadDomain* get_thread_domain(ibv_td* td) {
    return reinterpret_cast<ThreadDomain*>(td);
}

ProtectionDomain* make_domain(Context* context) {
    auto* const domain = new ProtectionDomain;
    domain->public_pd.context = context->public_context();
    domain->public_pd.handle = make_next_handle();
    domain->context = context;
    ++context->child_count;
    track("ibv_pd", domain);
    return domain;
}

constexpr std::uint32_t supported_parent_mask =
    IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;

// Make the checks that mlx5_alloc_parent_domain makes.
bool is_valid_parent_request(const ibv_context* context, const ibv_parent_domain_init_attr& attr) {
    const bool has_allocators = (attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) != 0;
    return (attr.comp_mask & ~supported_parent_mask) == 0 && is_alive("ibv_pd", attr.pd) &&
           attr.pd->context == context && get_domain(attr.pd)->base == nullptr &&
           (attr.td == nullptr || (is_alive("ibv_td", attr.td) && attr.td->context == context)) &&
           (!has_allocators || (attr.alloc != nullptr && attr.free != nullptr));
}

} // namespace

bool is_parent_domain(ibv_pd* pd) {
    return is_alive("ibv_pd", pd) && get_domain(pd)->base != nullptr;
}

ibv_td* alloc_thread_domain(ibv_context* public_context, ibv_td_init_attr* init_attr) {
    if (const auto fault = find_injected_fault("ibv_alloc_td")) {
        return fail_null(*fault);
    }
    Context* const context = get_context(public_context);
    if (!is_alive("ibv_context", context) || init_attr->comp_mask != 0) {
        return fail_null(EINVAL);
    }
    auto* const thread_domain = new ThreadDomain;
    thread_domain->public_td.context = public_context;
    ++context->child_count;
    track("ibv_td", thread_domain);
    return &thread_domain->public_td;
}

int dealloc_thread_domain(ibv_td* td) {
    if (const auto fault = find_injected_fault("ibv_dealloc_td")) {
        return *fault;
    }
    ThreadDomain* const thread_domain = get_thread_domain(td);
    if (!is_alive("ibv_td", thread_domain)) {
        return EINVAL;
    }
    if (thread_domain->user_count != 0) {
        return EBUSY;
    }
    Context* const context = get_context(td->context);
    if (!retire("ibv_td", thread_domain)) {
        return EINVAL;
    }
    --context->child_count;
    return 0;
}

// The allocators of a parent domain are for buffers that a provider shares with its device. The twin has no such
// buffers, so it never calls the allocators.
ibv_pd* alloc_parent_domain(ibv_context* public_context, ibv_parent_domain_init_attr* attr) {
    if (const auto fault = find_injected_fault("ibv_alloc_parent_domain")) {
        return fail_null(*fault);
    }
    Context* const context = get_context(public_context);
    if (!is_alive("ibv_context", context) || !is_valid_parent_request(public_context, *attr)) {
        return fail_null(EINVAL);
    }
    ProtectionDomain* const domain = make_domain(context);
    domain->base = get_domain(attr->pd);
    domain->thread_domain = attr->td;
    domain->public_pd.handle = attr->pd->handle;
    ++domain->base->child_count;
    if (attr->td != nullptr) {
        ++get_thread_domain(attr->td)->user_count;
    }
    return &domain->public_pd;
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_pd* ibv_alloc_pd(ibv_context* public_context) {
    if (const auto fault = find_injected_fault("ibv_alloc_pd")) {
        return fail_null(*fault);
    }
    Context* const context = get_context(public_context);
    if (!is_alive("ibv_context", context)) {
        return fail_null(EINVAL);
    }
    return &make_domain(context)->public_pd;
}

int ibv_dealloc_pd(ibv_pd* pd) {
    if (const auto fault = find_injected_fault("ibv_dealloc_pd")) {
        return *fault;
    }
    ProtectionDomain* const domain = get_domain(pd);
    if (!is_alive("ibv_pd", domain)) {
        return EINVAL;
    }
    if (domain->child_count != 0) {
        return EBUSY;
    }
    Context* const context = domain->context;
    ProtectionDomain* const base = domain->base;
    ibv_td* const thread_domain = domain->thread_domain;
    if (!retire("ibv_pd", domain)) {
        return EINVAL;
    }
    if (base != nullptr) {
        --base->child_count;
    }
    if (thread_domain != nullptr) {
        --get_thread_domain(thread_domain)->user_count;
    }
    --context->child_count;
    return 0;
}

} // extern "C"
