// The exported functions of queue pairs: create, destroy, modify and query.

#include <algorithm>
#include <cstring>
#include <utility>

#include "ibverbs/connected_queue_pair.hpp"
#include "ibverbs/datagram_queue_pair.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"
#include "model/usage.hpp"

namespace gdrkit::twin::verbs {
namespace {

// The size of the fields that ibv_qp_init_attr and ibv_qp_init_attr_ex have in common, at their start.
constexpr std::size_t common_attributes_bytes = offsetof(ibv_qp_init_attr_ex, comp_mask);
static_assert(common_attributes_bytes == offsetof(ibv_qp_init_attr, sq_sig_all) + sizeof(int));

constexpr std::uint32_t max_inline_bytes = 4096;

bool is_within_limits(const ibv_qp_cap& cap, const ibv_device_attr& device_limits) {
    const auto max_wr = static_cast<std::uint32_t>(device_limits.max_qp_wr);
    const auto max_sges = static_cast<std::uint32_t>(device_limits.max_sge);
    return cap.max_send_wr <= max_wr && cap.max_recv_wr <= max_wr && cap.max_send_sge <= max_sges &&
           cap.max_recv_sge <= max_sges && cap.max_inline_data <= max_inline_bytes;
}

// Check the type, the objects and the limits of a new queue pair, after remove_unused_attributes. Return 0, EINVAL or
// EOPNOTSUPP.
int check_init_attributes(const ibv_context* context, const ibv_qp_init_attr_ex& attr) {
    switch (attr.qp_type) {
    case IBV_QPT_RC:
    case IBV_QPT_UC:
    case IBV_QPT_XRC_SEND:
    case IBV_QPT_XRC_RECV:
    case IBV_QPT_UD:
        break;
    case IBV_QPT_RAW_PACKET:
    case IBV_QPT_DRIVER:
        return EOPNOTSUPP;
    default:
        return EINVAL;
    }
    const auto is_valid_object = [=](const char* type_name, const auto* object, bool is_needed) {
        return object == nullptr ? !is_needed : is_alive(type_name, object) && object->context == context;
    };
    const bool is_xrc_receive = attr.qp_type == IBV_QPT_XRC_RECV;
    const bool is_xrc_send = attr.qp_type == IBV_QPT_XRC_SEND;
    const bool is_valid = is_valid_object("ibv_pd", attr.pd, !is_xrc_receive) &&
                          is_valid_object("ibv_cq", attr.send_cq, !is_xrc_receive) &&
                          is_valid_object("ibv_cq", attr.recv_cq, !is_xrc_receive && !is_xrc_send) &&
                          is_valid_object("ibv_xrcd", attr.xrcd, is_xrc_receive) &&
                          is_valid_object("ibv_srq", attr.srq, false) &&
                          // Only the XRC receive queue pairs of an XRC domain deliver to its shared receive queues.
                          (attr.srq == nullptr || get_srq_handle(attr.srq)->xrcd == nullptr) &&
                          is_within_limits(attr.cap, make_device_attributes(*get_context(context)->device));
    return is_valid ? 0 : EINVAL;
}

void fill_public_structure(ibv_qp* qp, ibv_context* context, const ibv_qp_init_attr_ex& attr) {
    qp->context = context;
    qp->qp_context = attr.qp_context;
    qp->pd = attr.pd;
    qp->send_cq = attr.send_cq;
    qp->recv_cq = attr.recv_cq;
    qp->srq = attr.srq;
    qp->handle = make_next_handle();
    qp->state = IBV_QPS_RESET;
    qp->qp_type = attr.qp_type;
    pthread_mutex_init(&qp->mutex, nullptr);
    pthread_cond_init(&qp->cond, nullptr);
}

// Remove the objects that the type of the queue pair does not use, and the limits of queues that it does not have.
void remove_unused_attributes(ibv_qp_init_attr_ex* attr) {
    if (attr->qp_type == IBV_QPT_XRC_RECV) {
        attr->pd = nullptr;
        attr->send_cq = nullptr;
        attr->cap.max_send_wr = 0;
        attr->cap.max_send_sge = 0;
        attr->cap.max_inline_data = 0;
    } else {
        attr->xrcd = nullptr;
    }
    if (attr->qp_type == IBV_QPT_XRC_RECV || attr->qp_type == IBV_QPT_XRC_SEND) {
        attr->recv_cq = nullptr;
        attr->srq = nullptr;
    }
    if (attr->srq != nullptr || attr->recv_cq == nullptr) {
        attr->cap.max_recv_wr = 0;
        attr->cap.max_recv_sge = 0;
    }
}

// Give the pair at least 16 bytes of inline data for each scatter-gather entry, as Soft-RoCE does (rxe_qp_init_req):
// programs such as rdma_xclient post inline data although they request no space for it.
void round_up_inline_data(ibv_qp_cap* cap) {
    constexpr std::uint32_t entry_bytes = 16;
    if (cap->max_send_wr != 0) {
        cap->max_inline_data = std::max(cap->max_inline_data, cap->max_send_sge * entry_bytes);
    }
}

// Add `change` to the number of users of each object that the queue pair uses.
void change_user_counts(const QueuePairHandle& handle, int change) {
    const ibv_qp& qp = handle.public_qp_ex.qp_base;
    if (qp.pd != nullptr) {
        get_domain(qp.pd)->child_count += change;
    }
    for (ibv_cq* const cq : {qp.send_cq, qp.recv_cq}) {
        if (cq != nullptr) {
            get_cq_handle(cq)->impl->user_count += change;
        }
    }
    if (qp.srq != nullptr) {
        get_srq_handle(qp.srq)->impl->user_count += change;
    }
    if (handle.xrcd != nullptr) {
        get_xrcd_handle(handle.xrcd)->user_count += change;
    }
}

std::shared_ptr<QueuePair> make_queue_pair(ibv_qp* qp, const ibv_qp_init_attr_ex& attr) {
    ibv_qp_init_attr init_attr{};
    std::memcpy(static_cast<void*>(&init_attr), &attr, common_attributes_bytes);
    const auto get_completion_queue = [](ibv_cq* cq) { return cq != nullptr ? get_cq_handle(cq)->impl : nullptr; };
    ProtectionDomain* const domain = get_domain(attr.pd);
    if (attr.qp_type == IBV_QPT_UD) {
        return std::make_shared<DatagramQueuePair>(qp, domain, get_completion_queue(attr.send_cq),
                                                   get_completion_queue(attr.recv_cq), init_attr);
    }
    const auto xrc_domain = attr.xrcd != nullptr ? get_xrcd_handle(attr.xrcd)->impl : nullptr;
    return std::make_shared<ConnectedQueuePair>(qp, domain, get_completion_queue(attr.send_cq),
                                                get_completion_queue(attr.recv_cq), init_attr, xrc_domain);
}

// Create a queue pair, and store its actual limits in `attr`.
ibv_qp* create_queue_pair(ibv_context* context, ibv_qp_init_attr_ex* attr) {
    remove_unused_attributes(attr);
    if (const int error = check_init_attributes(context, *attr); error != 0) {
        return fail_null(error);
    }
    round_up_inline_data(&attr->cap);
    auto handle = std::make_unique<QueuePairHandle>();
    ibv_qp* const qp = &handle->public_qp_ex.qp_base;
    fill_public_structure(qp, context, *attr);
    handle->xrcd = attr->xrcd;
    handle->impl = make_queue_pair(qp, *attr);
    if (const int error = handle->impl->open(); error != 0) {
        return fail_null(error);
    }
    qp->qp_num = handle->impl->qp_num();
    handle->async_event_counter = handle->impl->async_event_counter;
    change_user_counts(*handle, 1);
    if (handle->xrcd != nullptr) {
        get_xrcd_handle(handle->xrcd)->impl->add_receive_qp(handle->impl, qp);
    }
    track("ibv_qp", handle.release());
    record_queue_pairs(1);
    return qp;
}

} // namespace

void acknowledge_async(ibv_qp* qp) {
    ++qp->events_completed;
    get_qp_handle(qp)->async_event_counter->acknowledge(1);
}

// Carry out ibv_create_qp_ex. Check the attributes as rdma-core's ibv_cmd_create_qp_ex does.
ibv_qp* create_queue_pair_extended(ibv_context* context, ibv_qp_init_attr_ex* init_attr) {
    if (const auto fault = find_injected_fault("ibv_create_qp_ex")) {
        return fail_null(*fault);
    }
    constexpr std::uint32_t supported_mask =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    const auto has_field = [=](std::uint32_t bit) { return (init_attr->comp_mask & bit) != 0; };
    if ((init_attr->comp_mask & ~supported_mask) != 0 ||
        (has_field(IBV_QP_INIT_ATTR_CREATE_FLAGS) && init_attr->create_flags != 0) ||
        (has_field(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) &&
         !supports_send_operations(init_attr->qp_type, init_attr->send_ops_flags))) {
        return fail_null(EOPNOTSUPP);
    }
    if (!is_alive("ibv_context", get_context(context)) ||
        !has_field(init_attr->qp_type == IBV_QPT_XRC_RECV ? IBV_QP_INIT_ATTR_XRCD : IBV_QP_INIT_ATTR_PD)) {
        return fail_null(EINVAL);
    }
    ibv_qp_init_attr_ex attr = *init_attr;
    ibv_qp* const qp = create_queue_pair(context, &attr);
    if (qp != nullptr) {
        init_attr->cap = attr.cap;
        if (has_field(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)) {
            enable_extended_posts(get_qp_handle(qp), init_attr->send_ops_flags);
        }
    }
    return qp;
}

// Carry out ibv_open_qp: make a further structure for a queue pair of an XRC domain. Check the attributes as
// rdma-core's ibv_cmd_open_qp and the kernel's ib_open_qp do.
ibv_qp* open_queue_pair(ibv_context* context, ibv_qp_open_attr* open_attr) {
    if (const auto fault = find_injected_fault("ibv_open_qp")) {
        return fail_null(*fault);
    }
    constexpr std::uint32_t required_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    if (open_attr->comp_mask >= IBV_QP_OPEN_ATTR_RESERVED) {
        return fail_null(EOPNOTSUPP);
    }
    if (!is_alive("ibv_context", get_context(context)) || (open_attr->comp_mask & required_mask) != required_mask ||
        open_attr->qp_type != IBV_QPT_XRC_RECV || !is_alive("ibv_xrcd", open_attr->xrcd) ||
        open_attr->xrcd->context != context) {
        return fail_null(EINVAL);
    }
    ibv_qp_init_attr_ex attr{};
    attr.qp_type = IBV_QPT_XRC_RECV;
    attr.qp_context = (open_attr->comp_mask & IBV_QP_OPEN_ATTR_CONTEXT) != 0 ? open_attr->qp_context : nullptr;
    auto handle = std::make_unique<QueuePairHandle>();
    ibv_qp* const qp = &handle->public_qp_ex.qp_base;
    fill_public_structure(qp, context, attr);
    qp->qp_num = open_attr->qp_num;
    handle->xrcd = open_attr->xrcd;
    handle->async_event_counter = std::make_shared<EventCounter>();
    handle->impl = get_xrcd_handle(open_attr->xrcd)->impl->open_receive_qp(open_attr->qp_num, qp);
    if (handle->impl == nullptr) {
        return fail_null(EINVAL);
    }
    ibv_qp_attr current_attr{};
    ibv_qp_init_attr unused_attr{};
    handle->impl->query(&current_attr, &unused_attr);
    qp->state = current_attr.qp_state;
    change_user_counts(*handle, 1);
    track("ibv_qp", handle.release());
    record_queue_pairs(1);
    return qp;
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init_attr) {
    if (const auto fault = find_injected_fault("ibv_create_qp")) {
        return fail_null(*fault);
    }
    if (!is_alive("ibv_pd", pd)) {
        return fail_null(EINVAL);
    }
    if (init_attr->qp_type == IBV_QPT_XRC_RECV) {
        // This function has no argument for the XRC domain.
        return fail_null(EINVAL);
    }
    ibv_qp_init_attr_ex attr{};
    std::memcpy(static_cast<void*>(&attr), init_attr, common_attributes_bytes);
    attr.comp_mask = IBV_QP_INIT_ATTR_PD;
    attr.pd = pd;
    ibv_qp* const qp = create_queue_pair(pd->context, &attr);
    if (qp != nullptr) {
        init_attr->cap = attr.cap;
    }
    return qp;
}

int ibv_destroy_qp(ibv_qp* qp) {
    if (const auto fault = find_injected_fault("ibv_destroy_qp")) {
        return *fault;
    }
    QueuePairHandle* const handle = get_qp_handle(qp);
    if (!is_alive("ibv_qp", handle)) {
        return EINVAL;
    }
    const std::shared_ptr<QueuePair> queue_pair = handle->impl;
    if (queue_pair->is_in_multicast_group()) {
        return EBUSY;
    }
    // ibv_open_qp may have made further structures for a queue pair of an XRC domain. Destroying the last structure
    // closes the pair.
    if (handle->xrcd == nullptr || get_xrcd_handle(handle->xrcd)->impl->remove_public_qp(qp)) {
        queue_pair->close();
    }
    get_context(qp->context)->drop_events(handle->async_event_counter);
    handle->async_event_counter->wait_until_acknowledged();
    if (!retire("ibv_qp", handle)) {
        return EINVAL;
    }
    gdrkit::twin::record_queue_pairs(-1);
    handle->impl.reset();
    change_user_counts(*handle, -1);
    return 0;
}

int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int attr_mask) {
    if (const auto fault = find_injected_fault("ibv_modify_qp")) {
        return *fault;
    }
    if (!is_alive("ibv_qp", qp)) {
        return EINVAL;
    }
    QueuePairHandle* const handle = get_qp_handle(qp);
    const int error = handle->impl->modify(*attr, attr_mask);
    if (error == 0 && (attr_mask & IBV_QP_STATE) != 0) {
        qp->state = attr->qp_state;
        if (attr->qp_state == IBV_QPS_RTR && !std::exchange(handle->has_reached_rtr, true)) {
            gdrkit::twin::record_ready_queue_pair();
        }
    }
    return error;
}

int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int attr_mask, ibv_qp_init_attr* init_attr) {
    if (const auto fault = find_injected_fault("ibv_query_qp")) {
        return *fault;
    }
    if (!is_alive("ibv_qp", qp)) {
        return EINVAL;
    }
    get_qp_handle(qp)->impl->query(attr, init_attr);
    if ((attr_mask & IBV_QP_STATE) != 0) {
        qp->state = attr->qp_state;
    }
    return 0;
}

// The result 0 means that the data of a request may arrive in any order. The twin guarantees no order.
int ibv_query_qp_data_in_order(ibv_qp*, ibv_wr_opcode, std::uint32_t) {
    return 0;
}

} // extern "C"
