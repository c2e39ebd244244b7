// ibv_modify_qp and ibv_query_qp of a queue pair: state transitions and attributes.

#include <sys/socket.h>

#include "ibverbs/qp_transitions.hpp"
#include "ibverbs/queue_pair.hpp"

namespace gdrkit::twin::verbs {

int QueuePair::modify(const ibv_qp_attr& attr, int attr_mask) {
    Lock lock(mutex_);
    const ibv_qp_state to = (attr_mask & IBV_QP_STATE) != 0 ? attr.qp_state : state_;
    if ((attr_mask & IBV_QP_CUR_STATE) != 0 && attr.cur_qp_state != state_) {
        return EINVAL;
    }
    if (const int error = check_transition(state_, to, attr_mask); error != 0) {
        return error;
    }
    if (const int error = check_values(attr, attr_mask); error != 0) {
        return error;
    }
    if (to == IBV_QPS_RESET) {
        reset(&lock);
        return 0;
    }
    if (to == IBV_QPS_ERR) {
        enter_error(lock, nullptr);
        // When the call returns, the pair moves no data any more.
        changed_.wait(lock, [this] { return no_connection_serves() && !sending_; });
        return 0;
    }
    apply(attr, attr_mask);
    drain_event_wanted_ = to == IBV_QPS_SQD && state_ == IBV_QPS_RTS && (attr_mask & IBV_QP_EN_SQD_ASYNC_NOTIFY) != 0 &&
                          attr.en_sqd_async_notify != 0;
    state_ = to;
    notify_change(lock);
    return 0;
}

void QueuePair::reset(Lock* lock) {
    state_ = IBV_QPS_RESET;
    ++generation_;
    if (peer_) {
        shutdown(peer_.get(), SHUT_RDWR);
    }
    shut_down_connections(*lock, nullptr);
    notify_change(*lock);
    changed_.wait(*lock, [this] { return no_connection_serves() && !sending_ && !flushing_; });
    disconnect(*lock);
    requester_state_ = {};
    sends_.clear();
    delayed_completions_.clear();
    receives_.clear();
    send_queue_slots_ = std::make_shared<WorkQueueSlots>();
    receive_queue_slots_ = std::make_shared<WorkQueueSlots>();
    unsignaled_count_ = 0;
    drain_event_wanted_ = false;
    send_queue_->drop(number_);
    receive_queue_->drop(number_);
    attr_ = {};
    attr_.path_mig_state = IBV_MIG_MIGRATED;
    attr_.cap = init_.cap;
}

void QueuePair::apply(const ibv_qp_attr& attr, int attr_mask) {
    const auto take = [&](int bit, auto ibv_qp_attr::*field) {
        if ((attr_mask & bit) != 0) {
            attr_.*field = attr.*field;
        }
    };
    take(IBV_QP_ACCESS_FLAGS, &ibv_qp_attr::qp_access_flags);
    take(IBV_QP_PKEY_INDEX, &ibv_qp_attr::pkey_index);
    take(IBV_QP_PORT, &ibv_qp_attr::port_num);
    take(IBV_QP_AV, &ibv_qp_attr::ah_attr);
    take(IBV_QP_PATH_MTU, &ibv_qp_attr::path_mtu);
    take(IBV_QP_TIMEOUT, &ibv_qp_attr::timeout);
    take(IBV_QP_RETRY_CNT, &ibv_qp_attr::retry_cnt);
    take(IBV_QP_RNR_RETRY, &ibv_qp_attr::rnr_retry);
    take(IBV_QP_RQ_PSN, &ibv_qp_attr::rq_psn);
    take(IBV_QP_SQ_PSN, &ibv_qp_attr::sq_psn);
    take(IBV_QP_MAX_QP_RD_ATOMIC, &ibv_qp_attr::max_rd_atomic);
    take(IBV_QP_MAX_DEST_RD_ATOMIC, &ibv_qp_attr::max_dest_rd_atomic);
    take(IBV_QP_MIN_RNR_TIMER, &ibv_qp_attr::min_rnr_timer);
    take(IBV_QP_DEST_QPN, &ibv_qp_attr::dest_qp_num);
    take(IBV_QP_PATH_MIG_STATE, &ibv_qp_attr::path_mig_state);
    // Packet sequence numbers have 24 bits; the upper bits are not sent.
    attr_.rq_psn &= 0xffffff;
    attr_.sq_psn &= 0xffffff;
}

void QueuePair::query(ibv_qp_attr* attr, ibv_qp_init_attr* init) {
    Lock lock(mutex_);
    *attr = attr_;
    attr->qp_state = state_;
    attr->cur_qp_state = state_;
    attr->sq_draining = state_ == IBV_QPS_SQD && (sending_ || !delayed_completions_.empty()) ? 1 : 0;
    *init = init_;
}

} // namespace gdrkit::twin::verbs
