// Implements the checks of ibv_modify_qp's transitions and values.

#include "ibverbs/qp_transitions.hpp"

#include <cerrno>

#include "ibverbs/device.hpp"

namespace gdrkit::twin::verbs {
namespace {

struct Transition {
    ibv_qp_state from, to;
    int required;
    int optional;
};

constexpr int when_sending =
    IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE | IBV_QP_ALT_PATH;

// The InfiniBand specification's table for reliable connections. check_transition handles RESET and ERR itself: every
// state may go there, except RESET to ERR, and no attributes are allowed.
constexpr Transition transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC, when_sending},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, when_sending},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, when_sending},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0,
     IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC |
         IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_MIN_RNR_TIMER |
         IBV_QP_PATH_MIG_STATE},
};

constexpr unsigned access_known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                  IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
constexpr int max_rd_atomics = 16;

bool is_valid_path(const ibv_ah_attr& path) {
    // On Ethernet, paths are addressed by GIDs only.
    return path.port_num == 1 && path.is_global == 1 && path.grh.sgid_index < gid_count && path.sl < 16;
}

} // namespace

int check_transition(ibv_qp_state from, ibv_qp_state to, int attr_mask) {
    const int attributes = attr_mask & ~IBV_QP_STATE;
    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET)) {
        return attributes == 0 ? 0 : EINVAL;
    }
    for (const Transition& known : transitions) {
        if (known.from == from && known.to == to) {
            const bool complete = (attributes & known.required) == known.required;
            const bool allowed = (attributes & ~(known.required | known.optional)) == 0;
            return complete && allowed ? 0 : EINVAL;
        }
    }
    return EINVAL;
}

int check_values(const ibv_qp_attr& attr, int attr_mask) {
    const auto has = [=](int bit) { return (attr_mask & bit) != 0; };
    const bool ok = (!has(IBV_QP_PKEY_INDEX) || attr.pkey_index == 0) && (!has(IBV_QP_PORT) || attr.port_num == 1) &&
                    (!has(IBV_QP_ACCESS_FLAGS) || (attr.qp_access_flags & ~access_known) == 0) &&
                    (!has(IBV_QP_AV) || is_valid_path(attr.ah_attr)) &&
                    (!has(IBV_QP_PATH_MTU) || (attr.path_mtu >= IBV_MTU_256 && attr.path_mtu <= IBV_MTU_4096)) &&
                    (!has(IBV_QP_DEST_QPN) || attr.dest_qp_num <= 0xffffff) &&
                    (!has(IBV_QP_MAX_DEST_RD_ATOMIC) || attr.max_dest_rd_atomic <= max_rd_atomics) &&
                    (!has(IBV_QP_MAX_QP_RD_ATOMIC) || attr.max_rd_atomic <= max_rd_atomics) &&
                    (!has(IBV_QP_MIN_RNR_TIMER) || attr.min_rnr_timer < 32) &&
                    (!has(IBV_QP_TIMEOUT) || attr.timeout < 32) && (!has(IBV_QP_RETRY_CNT) || attr.retry_cnt < 8) &&
                    (!has(IBV_QP_RNR_RETRY) || attr.rnr_retry < 8) &&
                    // The device has no second port to migrate to.
                    !has(IBV_QP_ALT_PATH) && (!has(IBV_QP_PATH_MIG_STATE) || attr.path_mig_state == IBV_MIG_MIGRATED);
    return ok ? 0 : EINVAL;
}

} // namespace gdrkit::twin::verbs
