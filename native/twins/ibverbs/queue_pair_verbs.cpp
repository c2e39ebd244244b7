// The exported functions of queue pairs: create, destroy, modify and query.

#include "ibverbs/connected_queue_pair.hpp"
#include "ibverbs/datagram_queue_pair.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::uint32_t max_inline_bytes = 4096;

bool is_within_limits(const ibv_qp_cap& cap, const ibv_device_attr& device_limits) {
    const auto max_wr = static_cast<std::uint32_t>(device_limits.max_qp_wr);
    const auto max_sges = static_cast<std::uint32_t>(device_limits.max_sge);
    return cap.max_send_wr <= max_wr && cap.max_recv_wr <= max_wr && cap.max_send_sge <= max_sges &&
           cap.max_recv_sge <= max_sges && cap.max_inline_data <= max_inline_bytes;
}

int check_init_attributes(const ibv_pd* pd, const ibv_qp_init_attr& init_attr) {
    switch (init_attr.qp_type) {
    case IBV_QPT_RC:
    case IBV_QPT_UD:
        break;
    case IBV_QPT_UC:
    case IBV_QPT_RAW_PACKET:
    case IBV_QPT_XRC_SEND:
    case IBV_QPT_XRC_RECV:
    case IBV_QPT_DRIVER:
        return EOPNOTSUPP;
    default:
        return EINVAL;
    }
    if (init_attr.srq != nullptr && (!is_alive("ibv_srq", init_attr.srq) || init_attr.srq->context != pd->context)) {
        return EINVAL;
    }
    const bool is_valid = is_alive("ibv_cq", init_attr.send_cq) && is_alive("ibv_cq", init_attr.recv_cq) &&
                          init_attr.send_cq->context == pd->context && init_attr.recv_cq->context == pd->context &&
                          is_within_limits(init_attr.cap, device_attributes(*context_of(pd->context)->device));
    return is_valid ? 0 : EINVAL;
}

void fill_public_structure(ibv_qp* qp, ibv_pd* pd, const ibv_qp_init_attr& init_attr) {
    qp->context = pd->context;
    qp->qp_context = init_attr.qp_context;
    qp->pd = pd;
    qp->send_cq = init_attr.send_cq;
    qp->recv_cq = init_attr.recv_cq;
    qp->srq = init_attr.srq;
    qp->handle = next_handle();
    qp->state = IBV_QPS_RESET;
    qp->qp_type = init_attr.qp_type;
    pthread_mutex_init(&qp->mutex, nullptr);
    pthread_cond_init(&qp->cond, nullptr);
}

} // namespace

void acknowledge_async(ibv_qp* qp) {
    ++qp->events_completed;
    qp_handle_of(qp)->model->async_event_counter->acknowledge(1);
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init_attr) {
    if (const auto fault = injected_fault("ibv_create_qp")) {
        return fail_null(*fault);
    }
    if (!is_alive("ibv_pd", pd)) {
        return fail_null(EINVAL);
    }
    if (init_attr->srq != nullptr) {
        // The pair has no receive queue, so the limits of one are ignored and reported as 0.
        init_attr->cap.max_recv_wr = 0;
        init_attr->cap.max_recv_sge = 0;
    }
    if (const int error = check_init_attributes(pd, *init_attr); error != 0) {
        return fail_null(error);
    }
    auto handle = std::make_unique<QueuePairHandle>();
    ibv_qp* const qp = &handle->abi.qp_base;
    fill_public_structure(qp, pd, *init_attr);
    ProtectionDomain* const domain = domain_of(pd);
    const std::shared_ptr<CompletionQueue> send_queue = cq_handle_of(init_attr->send_cq)->model;
    const std::shared_ptr<CompletionQueue> receive_queue = cq_handle_of(init_attr->recv_cq)->model;
    if (init_attr->qp_type == IBV_QPT_UD) {
        handle->model = std::make_shared<DatagramQueuePair>(qp, domain, send_queue, receive_queue, *init_attr);
    } else {
        handle->model = std::make_shared<ConnectedQueuePair>(qp, domain, send_queue, receive_queue, *init_attr);
    }
    if (const int error = handle->model->open(); error != 0) {
        return fail_null(error);
    }
    qp->qp_num = handle->model->qp_num();
    ++domain->child_count;
    ++send_queue->user_count;
    ++receive_queue->user_count;
    if (init_attr->srq != nullptr) {
        ++srq_handle_of(init_attr->srq)->model->user_count;
    }
    track("ibv_qp", handle.release());
    return qp;
}

int ibv_destroy_qp(ibv_qp* qp) {
    if (const auto fault = injected_fault("ibv_destroy_qp")) {
        return *fault;
    }
    QueuePairHandle* const handle = qp_handle_of(qp);
    if (!is_alive("ibv_qp", handle)) {
        return EINVAL;
    }
    const std::shared_ptr<QueuePair> model = handle->model;
    if (model->is_in_multicast_group()) {
        return EBUSY;
    }
    model->close();
    ProtectionDomain* const domain = domain_of(qp->pd);
    domain->context->drop_events(model->async_event_counter);
    model->async_event_counter->wait_until_acknowledged();
    if (!retire("ibv_qp", handle)) {
        return EINVAL;
    }
    handle->model.reset();
    --cq_handle_of(qp->send_cq)->model->user_count;
    --cq_handle_of(qp->recv_cq)->model->user_count;
    if (qp->srq != nullptr) {
        --srq_handle_of(qp->srq)->model->user_count;
    }
    --domain->child_count;
    return 0;
}

int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int attr_mask) {
    if (const auto fault = injected_fault("ibv_modify_qp")) {
        return *fault;
    }
    if (!is_alive("ibv_qp", qp)) {
        return EINVAL;
    }
    const int error = qp_handle_of(qp)->model->modify(*attr, attr_mask);
    if (error == 0 && (attr_mask & IBV_QP_STATE) != 0) {
        qp->state = attr->qp_state;
    }
    return error;
}

int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int attr_mask, ibv_qp_init_attr* init_attr) {
    if (const auto fault = injected_fault("ibv_query_qp")) {
        return *fault;
    }
    if (!is_alive("ibv_qp", qp)) {
        return EINVAL;
    }
    qp_handle_of(qp)->model->query(attr, init_attr);
    if ((attr_mask & IBV_QP_STATE) != 0) {
        qp->state = attr->qp_state;
    }
    return 0;
}

// The result 0 means that data may arrive in any order. This device guarantees no more.
int ibv_query_qp_data_in_order(ibv_qp*, ibv_wr_opcode, std::uint32_t) {
    return 0;
}

} // extern "C"
