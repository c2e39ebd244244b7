// ibv_alloc_pd and ibv_dealloc_pd.

#include "ibverbs/protection_domain.hpp"

#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_pd* ibv_alloc_pd(ibv_context* abi) {
    if (const auto fault = injected_fault("ibv_alloc_pd")) {
        return fail_null(*fault);
    }
    Context* const context = context_of(abi);
    if (!is_alive("ibv_context", context)) {
        return fail_null(EINVAL);
    }
    auto* const domain = new ProtectionDomain;
    domain->abi.context = abi;
    domain->abi.handle = next_handle();
    domain->context = context;
    ++context->child_count;
    track("ibv_pd", domain);
    return &domain->abi;
}

int ibv_dealloc_pd(ibv_pd* pd) {
    if (const auto fault = injected_fault("ibv_dealloc_pd")) {
        return *fault;
    }
    ProtectionDomain* const domain = domain_of(pd);
    if (!is_alive("ibv_pd", domain)) {
        return EINVAL;
    }
    if (domain->child_count != 0) {
        return EBUSY;
    }
    Context* const context = domain->context;
    if (!retire("ibv_pd", domain)) {
        return EINVAL;
    }
    --context->child_count;
    return 0;
}

} // extern "C"
