// Implements the checks of ibv_modify_qp for connected queue pairs: state transitions and attribute values.

#include "ibverbs/qp_transitions.hpp"

#include <cerrno>
#include <span>

#include "ibverbs/device.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A transition, with the attributes (IBV_QP_*, without IBV_QP_STATE) that it requires and allows.
struct Transition {
    ibv_qp_state from, to;
    int required_mask;
    int optional_mask;
};

// The transitions of the InfiniBand specification, as in the kernel's qp_state_table. The tables leave out RESET and
// ERR as new states: check_transition lets every state change to RESET, and every state except RESET change to ERR,
// always without attributes.

// Attributes of connected queue pairs that may change when the queue pair enters RTS or stays in RTS.
constexpr int rts_attributes = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE | IBV_QP_ALT_PATH;
constexpr int responder_rts_attributes = rts_attributes | IBV_QP_MIN_RNR_TIMER;
constexpr int init_attributes = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int path_attributes = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
constexpr int optional_path_attributes = IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX;
// Attributes of every connected queue pair that may change while its send queue is drained (SQD).
constexpr int sqd_attributes =
    IBV_QP_AV | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PATH_MIG_STATE;
constexpr int requester_attributes = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
constexpr int responder_attributes = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;

constexpr Transition reliable_transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, init_attributes, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, init_attributes},
    {IBV_QPS_INIT, IBV_QPS_RTR, path_attributes | responder_attributes, optional_path_attributes},
    {IBV_QPS_RTR, IBV_QPS_RTS, requester_attributes | IBV_QP_SQ_PSN, responder_rts_attributes},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, responder_rts_attributes},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, responder_rts_attributes},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, sqd_attributes | requester_attributes | responder_attributes | IBV_QP_PORT},
};

constexpr Transition unreliable_transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, init_attributes, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, init_attributes},
    {IBV_QPS_INIT, IBV_QPS_RTR, path_attributes, optional_path_attributes},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, rts_attributes},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, rts_attributes},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, rts_attributes},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, sqd_attributes},
};

constexpr Transition xrc_send_transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, init_attributes, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, init_attributes},
    {IBV_QPS_INIT, IBV_QPS_RTR, path_attributes, optional_path_attributes},
    {IBV_QPS_RTR, IBV_QPS_RTS, requester_attributes | IBV_QP_SQ_PSN, rts_attributes},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, rts_attributes},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, rts_attributes},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, sqd_attributes | requester_attributes | IBV_QP_PORT},
};

constexpr Transition xrc_receive_transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, init_attributes, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, init_attributes},
    {IBV_QPS_INIT, IBV_QPS_RTR, path_attributes | responder_attributes, optional_path_attributes},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_TIMEOUT | IBV_QP_SQ_PSN, responder_rts_attributes},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, responder_rts_attributes},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, responder_rts_attributes},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, sqd_attributes | responder_attributes | IBV_QP_PORT | IBV_QP_TIMEOUT},
};

std::span<const Transition> get_transitions(ibv_qp_type type) {
    switch (type) {
    case IBV_QPT_UC:
        return unreliable_transitions;
    case IBV_QPT_XRC_SEND:
        return xrc_send_transitions;
    case IBV_QPT_XRC_RECV:
        return xrc_receive_transitions;
    default:
        return reliable_transitions;
    }
}

// IBV_ACCESS_FLUSH_GLOBAL and IBV_ACCESS_FLUSH_PERSISTENT of newer headers. The kernel lets a program set them on any
// queue pair. No request of the twin needs them.
constexpr unsigned flush_access_flags = 1U << 8 | 1U << 9;
constexpr unsigned supported_access_flags = flush_access_flags | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
constexpr int max_rd_atomic_count = 16;

bool is_valid_path(const ibv_ah_attr& path) {
    // On Ethernet, only GIDs address a path. A service level (sl) has 4 bits.
    return path.port_num == 1 && path.is_global == 1 && path.grh.sgid_index < gid_count && path.sl < 16;
}

} // namespace

int remove_ignored_attributes(ibv_qp_type type, int attr_mask) {
    switch (type) {
    case IBV_QPT_XRC_SEND:
        return attr_mask & ~(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    case IBV_QPT_XRC_RECV:
        return attr_mask & ~(IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
    default:
        return attr_mask;
    }
}

int check_transition(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to, int attr_mask) {
    const int attribute_bits = attr_mask & ~IBV_QP_STATE;
    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET)) {
        return attribute_bits == 0 ? 0 : EINVAL;
    }
    for (const Transition& transition : get_transitions(type)) {
        if (transition.from == from && transition.to == to) {
            const bool has_all_required = (attribute_bits & transition.required_mask) == transition.required_mask;
            const bool has_only_allowed =
                (attribute_bits & ~(transition.required_mask | transition.optional_mask)) == 0;
            return has_all_required && has_only_allowed ? 0 : EINVAL;
        }
    }
    return EINVAL;
}

// In the packets and in the hardware, queue pair numbers have 24 bits, timers 5 bits and retry counts 3 bits.
int check_attribute_values(const ibv_qp_attr& attr, int attr_mask) {
    const auto is_selected = [=](int bit) { return (attr_mask & bit) != 0; };
    const bool are_valid =
        (!is_selected(IBV_QP_PKEY_INDEX) || attr.pkey_index == 0) &&
        (!is_selected(IBV_QP_PORT) || attr.port_num == 1) &&
        (!is_selected(IBV_QP_ACCESS_FLAGS) || (attr.qp_access_flags & ~supported_access_flags) == 0) &&
        (!is_selected(IBV_QP_AV) || is_valid_path(attr.ah_attr)) &&
        (!is_selected(IBV_QP_PATH_MTU) || (attr.path_mtu >= IBV_MTU_256 && attr.path_mtu <= IBV_MTU_4096)) &&
        (!is_selected(IBV_QP_DEST_QPN) || attr.dest_qp_num <= 0xffffff) &&
        (!is_selected(IBV_QP_MAX_DEST_RD_ATOMIC) || attr.max_dest_rd_atomic <= max_rd_atomic_count) &&
        (!is_selected(IBV_QP_MAX_QP_RD_ATOMIC) || attr.max_rd_atomic <= max_rd_atomic_count) &&
        (!is_selected(IBV_QP_MIN_RNR_TIMER) || attr.min_rnr_timer < 32) &&
        (!is_selected(IBV_QP_TIMEOUT) || attr.timeout < 32) && (!is_selected(IBV_QP_RETRY_CNT) || attr.retry_cnt < 8) &&
        (!is_selected(IBV_QP_RNR_RETRY) || attr.rnr_retry < 8) &&
        // The device has no second port to migrate to.
        !is_selected(IBV_QP_ALT_PATH) &&
        (!is_selected(IBV_QP_PATH_MIG_STATE) || attr.path_mig_state == IBV_MIG_MIGRATED);
    return are_valid ? 0 : EINVAL;
}

} // namespace gdrkit::twin::verbs
