// The exported functions of queue pairs: create, destroy, modify and query.

#include "ibverbs/handle.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::uint32_t max_inline_bytes = 4096;

bool is_within_limits(const ibv_qp_cap& cap, const ibv_device_attr& most) {
    const auto max_wr = static_cast<std::uint32_t>(most.max_qp_wr);
    const auto max_sges = static_cast<std::uint32_t>(most.max_sge);
    return cap.max_send_wr <= max_wr && cap.max_recv_wr <= max_wr && cap.max_send_sge <= max_sges &&
           cap.max_recv_sge <= max_sges && cap.max_inline_data <= max_inline_bytes;
}

int check_init_attributes(const ibv_pd* pd, const ibv_qp_init_attr& init) {
    switch (init.qp_type) {
    case IBV_QPT_RC:
        break;
    case IBV_QPT_UC:
    case IBV_QPT_UD:
    case IBV_QPT_RAW_PACKET:
    case IBV_QPT_XRC_SEND:
    case IBV_QPT_XRC_RECV:
    case IBV_QPT_DRIVER:
        return EOPNOTSUPP;
    default:
        return EINVAL;
    }
    if (init.srq != nullptr) {
        return EOPNOTSUPP;
    }
    const bool valid = is_alive("ibv_cq", init.send_cq) && is_alive("ibv_cq", init.recv_cq) &&
                       init.send_cq->context == pd->context && init.recv_cq->context == pd->context &&
                       is_within_limits(init.cap, device_attributes(*context_of(pd->context)->device));
    return valid ? 0 : EINVAL;
}

void fill_public_structure(ibv_qp* qp, ibv_pd* pd, const ibv_qp_init_attr& init) {
    qp->context = pd->context;
    qp->qp_context = init.qp_context;
    qp->pd = pd;
    qp->send_cq = init.send_cq;
    qp->recv_cq = init.recv_cq;
    qp->handle = next_handle();
    qp->state = IBV_QPS_RESET;
    qp->qp_type = init.qp_type;
    pthread_mutex_init(&qp->mutex, nullptr);
    pthread_cond_init(&qp->cond, nullptr);
}

} // namespace

void acknowledge_async(ibv_qp* qp) {
    ++qp->events_completed;
    qp_handle_of(qp)->model->async_events->acknowledge(1);
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
    if (const auto fault = injected_fault("ibv_create_qp")) {
        return fail_null(*fault);
    }
    if (!is_alive("ibv_pd", pd)) {
        return fail_null(EINVAL);
    }
    if (const int error = check_init_attributes(pd, *init); error != 0) {
        return fail_null(error);
    }
    auto handle = std::make_unique<QueuePairHandle>();
    ibv_qp* const qp = &handle->abi.qp_base;
    fill_public_structure(qp, pd, *init);
    ProtectionDomain* const domain = domain_of(pd);
    const std::shared_ptr<CompletionQueue> send_queue = cq_handle_of(init->send_cq)->model;
    const std::shared_ptr<CompletionQueue> receive_queue = cq_handle_of(init->recv_cq)->model;
    handle->model = std::make_shared<QueuePair>(qp, domain, send_queue, receive_queue, *init);
    if (const int error = handle->model->open(); error != 0) {
        return fail_null(error);
    }
    qp->qp_num = handle->model->number();
    ++domain->children;
    ++send_queue->users;
    ++receive_queue->users;
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
    model->close();
    ProtectionDomain* const domain = domain_of(qp->pd);
    domain->context->drop_events(model->async_events);
    model->async_events->wait_until_acknowledged();
    if (!retire("ibv_qp", handle)) {
        return EINVAL;
    }
    handle->model.reset();
    --cq_handle_of(qp->send_cq)->model->users;
    --cq_handle_of(qp->recv_cq)->model->users;
    --domain->children;
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

// 0 means that data may arrive in any order, which is all that this device guarantees.
int ibv_query_qp_data_in_order(ibv_qp*, ibv_wr_opcode, std::uint32_t) {
    return 0;
}

} // extern "C"
