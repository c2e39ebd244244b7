// The public functions of shared receive queues: create, modify, query, destroy, and functions that clients call
// through the tables of function pointers of a context.

#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"
#include "ibverbs/shared_receive_queue.hpp"
#include "ibverbs/xrc_domain.hpp"

namespace gdrkit::twin::verbs {
namespace {

bool is_within_limits(const ibv_srq_attr& attr, const ibv_device_attr& device_limits) {
    return attr.max_wr > 0 && attr.max_wr <= static_cast<std::uint32_t>(device_limits.max_srq_wr) &&
           attr.max_sge <= static_cast<std::uint32_t>(device_limits.max_srq_sge);
}

void fill_public_structure(ibv_srq* srq, ibv_pd* pd, void* srq_context) {
    srq->context = pd->context;
    srq->srq_context = srq_context;
    srq->pd = pd;
    srq->handle = make_next_handle();
    pthread_mutex_init(&srq->mutex, nullptr);
    pthread_cond_init(&srq->cond, nullptr);
}

bool has_valid_xrc_objects(const ibv_pd* pd, const ibv_srq_init_attr_ex& attr) {
    return is_alive("ibv_xrcd", attr.xrcd) && is_alive("ibv_cq", attr.cq) && attr.xrcd->context == pd->context &&
           attr.cq->context == pd->context;
}

// Create a basic queue, or an XRC queue if `attr.xrcd` is set.
ibv_srq* create_queue(ibv_pd* pd, const ibv_srq_init_attr_ex& attr) {
    ProtectionDomain* const domain = get_domain(pd);
    if (!is_alive("ibv_pd", pd) || !is_within_limits(attr.attr, make_device_attributes(*domain->context->device)) ||
        (attr.xrcd != nullptr && !has_valid_xrc_objects(pd, attr))) {
        return fail_null(EINVAL);
    }
    auto handle = std::make_unique<SharedReceiveQueueHandle>();
    ibv_srq* const srq = &handle->public_srq;
    fill_public_structure(srq, pd, attr.srq_context);
    const auto completion_queue = attr.xrcd != nullptr ? get_cq_handle(attr.cq)->impl : nullptr;
    handle->impl = std::make_shared<SharedReceiveQueue>(srq, domain, attr.attr, completion_queue);
    ++domain->child_count;
    if (attr.xrcd != nullptr) {
        handle->xrcd = attr.xrcd;
        handle->cq = attr.cq;
        ++completion_queue->user_count;
        ++get_xrcd_handle(attr.xrcd)->user_count;
        get_xrcd_handle(attr.xrcd)->impl->add_queue(handle->impl);
    }
    track("ibv_srq", handle.release());
    return srq;
}

} // namespace

void acknowledge_async(ibv_srq* srq) {
    ++srq->events_completed;
    get_srq_handle(srq)->impl->async_event_counter->acknowledge(1);
}

// Check the attributes as rdma-core's ibv_cmd_create_srq_ex does.
ibv_srq* create_srq_extended(ibv_context* context, ibv_srq_init_attr_ex* init_attr) {
    if (const auto fault = find_injected_fault("ibv_create_srq_ex")) {
        return fail_null(*fault);
    }
    const auto has_fields = [=](std::uint32_t bits) { return (init_attr->comp_mask & bits) == bits; };
    const ibv_srq_type type = has_fields(IBV_SRQ_INIT_ATTR_TYPE) ? init_attr->srq_type : IBV_SRQT_BASIC;
    if (init_attr->comp_mask >= IBV_SRQ_INIT_ATTR_RESERVED || (type != IBV_SRQT_BASIC && type != IBV_SRQT_XRC)) {
        return fail_null(EOPNOTSUPP);
    }
    ibv_srq_init_attr_ex attr = *init_attr;
    if (!has_fields(IBV_SRQ_INIT_ATTR_PD) ||
        (type == IBV_SRQT_XRC && !has_fields(IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ)) ||
        !is_alive("ibv_pd", attr.pd) || attr.pd->context != context || (type == IBV_SRQT_XRC && attr.xrcd == nullptr)) {
        return fail_null(EINVAL);
    }
    if (type == IBV_SRQT_BASIC) {
        attr.xrcd = nullptr;
    }
    return create_queue(attr.pd, attr);
}

int get_srq_number(ibv_srq* srq, std::uint32_t* number) {
    if (!is_alive("ibv_srq", srq)) {
        return EINVAL;
    }
    *number = get_srq_handle(srq)->impl->number();
    return 0;
}

int post_srq_receive(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
    const auto fault = find_injected_fault("ibv_post_srq_recv");
    int error = fault ? *fault : is_alive("ibv_srq", srq) ? 0 : EINVAL;
    // After an error, `wr` stays at the request that failed.
    for (; error == 0 && wr != nullptr; wr = error == 0 ? wr->next : wr) {
        error = get_srq_handle(srq)->impl->post(*wr);
    }
    if (error != 0) {
        *bad_wr = wr;
    }
    return error;
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* init_attr) {
    if (const auto fault = find_injected_fault("ibv_create_srq")) {
        return fail_null(*fault);
    }
    ibv_srq_init_attr_ex extended_attr{};
    extended_attr.srq_context = init_attr->srq_context;
    extended_attr.attr = init_attr->attr;
    extended_attr.pd = pd;
    return create_queue(pd, extended_attr);
}

int ibv_destroy_srq(ibv_srq* srq) {
    if (const auto fault = find_injected_fault("ibv_destroy_srq")) {
        return *fault;
    }
    SharedReceiveQueueHandle* const handle = get_srq_handle(srq);
    if (!is_alive("ibv_srq", handle)) {
        return EINVAL;
    }
    if (handle->impl->user_count != 0) {
        return EBUSY;
    }
    const std::shared_ptr<SharedReceiveQueue> receive_queue = handle->impl;
    receive_queue->domain()->context->drop_events(receive_queue->async_event_counter);
    receive_queue->async_event_counter->wait_until_acknowledged();
    if (!retire("ibv_srq", handle)) {
        return EINVAL;
    }
    if (handle->xrcd != nullptr) {
        get_xrcd_handle(handle->xrcd)->impl->remove_queue(*receive_queue);
        --get_xrcd_handle(handle->xrcd)->user_count;
        --get_cq_handle(handle->cq)->impl->user_count;
    }
    handle->impl.reset();
    --receive_queue->domain()->child_count;
    return 0;
}

int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* srq_attr, int srq_attr_mask) {
    if (const auto fault = find_injected_fault("ibv_modify_srq")) {
        return *fault;
    }
    return is_alive("ibv_srq", srq) ? get_srq_handle(srq)->impl->modify(*srq_attr, srq_attr_mask) : EINVAL;
}

int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* srq_attr) {
    if (const auto fault = find_injected_fault("ibv_query_srq")) {
        return *fault;
    }
    if (!is_alive("ibv_srq", srq)) {
        return EINVAL;
    }
    *srq_attr = get_srq_handle(srq)->impl->query();
    return 0;
}

} // extern "C"
