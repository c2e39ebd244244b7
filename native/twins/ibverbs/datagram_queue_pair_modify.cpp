// ibv_modify_qp and ibv_query_qp of a datagram queue pair: state transitions and attributes.

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ibverbs/datagram_queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A transition of ibv_modify_qp, with the attributes (IBV_QP_*, without IBV_QP_STATE) that it requires and allows.
struct Transition {
    ibv_qp_state from, to;
    int required_mask;
    int optional_mask;
};

// The transitions of a UD queue pair in the InfiniBand specification. The transitions to RESET and to ERR are missing,
// because they have no attributes (see check_transition).
constexpr Transition transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY},
    {IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
};

// A Q_Key with this bit is controlled (InfiniBand specification, 10.2.5). Only privileged users may give such a Q_Key
// to a queue pair. A send request with a controlled Q_Key uses the Q_Key of its queue pair instead.
constexpr std::uint32_t controlled_qkey_bit = 0x80000000U;

int check_transition(ibv_qp_state from, ibv_qp_state to, int attr_mask) {
    const int attribute_bits = attr_mask & ~IBV_QP_STATE;
    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET)) {
        return attribute_bits == 0 ? 0 : EINVAL;
    }
    for (const Transition& transition : transitions) {
        if (transition.from == from && transition.to == to) {
            const bool has_all_required = (attribute_bits & transition.required_mask) == transition.required_mask;
            const bool has_only_allowed =
                (attribute_bits & ~(transition.required_mask | transition.optional_mask)) == 0;
            return has_all_required && has_only_allowed ? 0 : EINVAL;
        }
    }
    return EINVAL;
}

// Return whether the process may use raw packets. The kernel demands this privilege for a controlled Q_Key (since Linux
// 6.4, ib_uverbs).
bool may_use_raw_packets() {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct capabilities[_LINUX_CAPABILITY_U32S_3] = {};
    return syscall(SYS_capget, &header, capabilities) == 0 && (capabilities[0].effective & (1U << CAP_NET_RAW)) != 0;
}

int check_datagram_attribute_values(const ibv_qp_attr& attr, int attr_mask) {
    const auto is_selected = [=](int bit) { return (attr_mask & bit) != 0; };
    if ((is_selected(IBV_QP_PKEY_INDEX) && attr.pkey_index != 0) || (is_selected(IBV_QP_PORT) && attr.port_num != 1)) {
        return EINVAL;
    }
    const bool needs_privilege = is_selected(IBV_QP_QKEY) && (attr.qkey & controlled_qkey_bit) != 0;
    return needs_privilege && !may_use_raw_packets() ? EPERM : 0;
}

} // namespace

int DatagramQueuePair::modify(const ibv_qp_attr& attr, int attr_mask) {
    Lock lock(mutex_);
    const ibv_qp_state new_state = (attr_mask & IBV_QP_STATE) != 0 ? attr.qp_state : state_;
    if ((attr_mask & IBV_QP_CUR_STATE) != 0 && attr.cur_qp_state != state_) {
        return EINVAL;
    }
    if (const int error = check_transition(state_, new_state, attr_mask); error != 0) {
        return error;
    }
    if (const int error = check_datagram_attribute_values(attr, attr_mask); error != 0) {
        return error;
    }
    if (new_state == IBV_QPS_RESET) {
        reset(&lock);
        return 0;
    }
    if (new_state == IBV_QPS_ERR) {
        enter_error(lock, IBV_QPS_ERR);
        // Wait, so that the pair moves no data after the call has returned.
        wait_until_idle(&lock);
        return 0;
    }
    if ((attr_mask & IBV_QP_PKEY_INDEX) != 0) {
        attr_.pkey_index = attr.pkey_index;
    }
    if ((attr_mask & IBV_QP_PORT) != 0) {
        attr_.port_num = attr.port_num;
    }
    if ((attr_mask & IBV_QP_QKEY) != 0) {
        attr_.qkey = attr.qkey;
    }
    if ((attr_mask & IBV_QP_SQ_PSN) != 0) {
        attr_.sq_psn = attr.sq_psn & 0xffffff; // a packet sequence number has 24 bits
    }
    must_raise_drained_ = new_state == IBV_QPS_SQD && state_ == IBV_QPS_RTS &&
                          (attr_mask & IBV_QP_EN_SQD_ASYNC_NOTIFY) != 0 && attr.en_sqd_async_notify != 0;
    state_ = new_state;
    notify_change(lock);
    return 0;
}

void DatagramQueuePair::reset(Lock* lock) {
    state_ = IBV_QPS_RESET;
    notify_change(*lock);
    wait_until_idle(lock);
    posted_sends_.clear();
    posted_receives_.clear();
    delayed_send_completions_.clear();
    delayed_receive_completions_.clear();
    send_queue_slots_ = std::make_shared<WorkQueueSlots>();
    receive_queue_slots_ = std::make_shared<WorkQueueSlots>();
    unsignaled_count_ = 0;
    retry_at_.reset();
    must_raise_drained_ = false;
    must_raise_last_wqe_ = false;
    send_cq_->drop_completions_of(qp_num_);
    receive_cq_->drop_completions_of(qp_num_);
    attr_ = make_initial_attributes();
}

// Enter ERR, or SQE after a send request that failed. A pair in SQE still receives, and ibv_modify_qp can return it to
// RTS.
void DatagramQueuePair::enter_error(const Lock& lock, ibv_qp_state error_state) {
    if (state_ == IBV_QPS_RESET || state_ == IBV_QPS_ERR) {
        return;
    }
    state_ = error_state;
    retry_at_.reset();
    must_raise_last_wqe_ = error_state == IBV_QPS_ERR && shared_receive_queue_ != nullptr;
    notify_change(lock);
}

void DatagramQueuePair::query(ibv_qp_attr* attr, ibv_qp_init_attr* init_attr) {
    Lock lock(mutex_);
    *attr = attr_;
    attr->qp_state = state_;
    attr->cur_qp_state = state_;
    attr->sq_draining = state_ == IBV_QPS_SQD && (is_busy_ || !delayed_send_completions_.empty()) ? 1 : 0;
    *init_attr = init_attr_;
}

} // namespace gdrkit::twin::verbs
