// The public functions of shared receive queues: create, modify, query, destroy, and the operations of the tables.

#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"
#include "ibverbs/shared_receive_queue.hpp"

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
    srq->handle = next_handle();
    pthread_mutex_init(&srq->mutex, nullptr);
    pthread_cond_init(&srq->cond, nullptr);
}

} // namespace

void acknowledge_async(ibv_srq* srq) {
    ++srq->events_completed;
    srq_handle_of(srq)->model->async_event_counter->acknowledge(1);
}

int post_srq_receive(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
    const auto fault = injected_fault("ibv_post_srq_recv");
    int error = fault ? *fault : is_alive("ibv_srq", srq) ? 0 : EINVAL;
    for (; error == 0 && wr != nullptr; wr = error == 0 ? wr->next : wr) {
        error = srq_handle_of(srq)->model->post(*wr);
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
    if (const auto fault = injected_fault("ibv_create_srq")) {
        return fail_null(*fault);
    }
    ProtectionDomain* const domain = domain_of(pd);
    if (!is_alive("ibv_pd", pd) || !is_within_limits(init_attr->attr, device_attributes(*domain->context->device))) {
        return fail_null(EINVAL);
    }
    auto handle = std::make_unique<SharedReceiveQueueHandle>();
    ibv_srq* const srq = &handle->abi;
    fill_public_structure(srq, pd, init_attr->srq_context);
    handle->model = std::make_shared<SharedReceiveQueue>(srq, domain, init_attr->attr);
    ++domain->child_count;
    track("ibv_srq", handle.release());
    return srq;
}

int ibv_destroy_srq(ibv_srq* srq) {
    if (const auto fault = injected_fault("ibv_destroy_srq")) {
        return *fault;
    }
    SharedReceiveQueueHandle* const handle = srq_handle_of(srq);
    if (!is_alive("ibv_srq", handle)) {
        return EINVAL;
    }
    if (handle->model->user_count != 0) {
        return EBUSY;
    }
    const std::shared_ptr<SharedReceiveQueue> model = handle->model;
    model->domain()->context->drop_events(model->async_event_counter);
    model->async_event_counter->wait_until_acknowledged();
    if (!retire("ibv_srq", handle)) {
        return EINVAL;
    }
    handle->model.reset();
    --model->domain()->child_count;
    return 0;
}

int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* srq_attr, int srq_attr_mask) {
    if (const auto fault = injected_fault("ibv_modify_srq")) {
        return *fault;
    }
    return is_alive("ibv_srq", srq) ? srq_handle_of(srq)->model->modify(*srq_attr, srq_attr_mask) : EINVAL;
}

int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* srq_attr) {
    if (const auto fault = injected_fault("ibv_query_srq")) {
        return *fault;
    }
    if (!is_alive("ibv_srq", srq)) {
        return EINVAL;
    }
    *srq_attr = srq_handle_of(srq)->model->query();
    return 0;
}

} // extern "C"
