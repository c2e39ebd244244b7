// ibv_modify_qp and ibv_query_qp for a connected queue pair (RC, UC or XRC): they change and query its state and its
// attributes.

#include <sys/socket.h>

#include "ibverbs/connected_queue_pair.hpp"
#include "ibverbs/qp_transitions.hpp"

namespace gdrkit::twin::verbs {

int ConnectedQueuePair::modify(const ibv_qp_attr& attr, int requested_mask) {
    const int attr_mask = remove_ignored_attributes(type(), requested_mask);
    Lock lock(mutex_);
    const ibv_qp_state new_state = (attr_mask & IBV_QP_STATE) != 0 ? attr.qp_state : state_;
    if ((attr_mask & IBV_QP_CUR_STATE) != 0 && attr.cur_qp_state != state_) {
        return EINVAL;
    }
    if (const int error = check_transition(type(), state_, new_state, attr_mask); error != 0) {
        return error;
    }
    if (const int error = check_attribute_values(attr, attr_mask); error != 0) {
        return error;
    }
    if (new_state == IBV_QPS_RESET) {
        reset(&lock);
        return 0;
    }
    if (new_state == IBV_QPS_ERR) {
        enter_error(lock, nullptr);
        // Wait until no responder thread serves requests and the requester has stopped, so that the pair moves no data
        // after ibv_modify_qp has returned.
        state_changed_.wait(lock, [this] { return no_connection_serves() && !is_sending_; });
        return 0;
    }
    apply_attributes(attr, attr_mask);
    // Peers with a grant (grants.hpp) access memory by themselves, so grants of the old permissions must end.
    if ((attr_mask & (IBV_QP_ACCESS_FLAGS | IBV_QP_MAX_DEST_RD_ATOMIC)) != 0) {
        revoke_grants(lock);
    }
    must_raise_drained_ = new_state == IBV_QPS_SQD && state_ == IBV_QPS_RTS &&
                          (attr_mask & IBV_QP_EN_SQD_ASYNC_NOTIFY) != 0 && attr.en_sqd_async_notify != 0;
    state_ = new_state;
    notify_change(lock);
    return 0;
}

void ConnectedQueuePair::reset(Lock* lock) {
    state_ = IBV_QPS_RESET;
    ++generation_;
    if (peer_socket_) {
        shutdown(peer_socket_.get(), SHUT_RDWR);
    }
    shut_down_connections(*lock, nullptr);
    notify_change(*lock);
    // After this wait, no other thread uses the posted requests, so the code below can discard them.
    state_changed_.wait(*lock, [this] { return no_connection_serves() && !is_sending_ && !is_flushing_; });
    disconnect(*lock);
    requester_state_ = {};
    posted_sends_.clear();
    delayed_completions_.clear();
    posted_receives_.clear();
    send_queue_slots_ = std::make_shared<WorkQueueSlots>();
    receive_queue_slots_ = std::make_shared<WorkQueueSlots>();
    unsignaled_count_ = 0;
    must_raise_drained_ = false;
    must_raise_last_wqe_ = false;
    drop_completions();
    attr_ = make_initial_attributes();
}

void ConnectedQueuePair::apply_attributes(const ibv_qp_attr& attr, int attr_mask) {
    const auto copy_if_set = [&](int mask_bit, auto ibv_qp_attr::*field) {
        if ((attr_mask & mask_bit) != 0) {
            attr_.*field = attr.*field;
        }
    };
    copy_if_set(IBV_QP_ACCESS_FLAGS, &ibv_qp_attr::qp_access_flags);
    copy_if_set(IBV_QP_PKEY_INDEX, &ibv_qp_attr::pkey_index);
    copy_if_set(IBV_QP_PORT, &ibv_qp_attr::port_num);
    copy_if_set(IBV_QP_AV, &ibv_qp_attr::ah_attr);
    copy_if_set(IBV_QP_PATH_MTU, &ibv_qp_attr::path_mtu);
    copy_if_set(IBV_QP_TIMEOUT, &ibv_qp_attr::timeout);
    copy_if_set(IBV_QP_RETRY_CNT, &ibv_qp_attr::retry_cnt);
    copy_if_set(IBV_QP_RNR_RETRY, &ibv_qp_attr::rnr_retry);
    copy_if_set(IBV_QP_RQ_PSN, &ibv_qp_attr::rq_psn);
    copy_if_set(IBV_QP_SQ_PSN, &ibv_qp_attr::sq_psn);
    copy_if_set(IBV_QP_MAX_QP_RD_ATOMIC, &ibv_qp_attr::max_rd_atomic);
    copy_if_set(IBV_QP_MAX_DEST_RD_ATOMIC, &ibv_qp_attr::max_dest_rd_atomic);
    copy_if_set(IBV_QP_MIN_RNR_TIMER, &ibv_qp_attr::min_rnr_timer);
    copy_if_set(IBV_QP_DEST_QPN, &ibv_qp_attr::dest_qp_num);
    copy_if_set(IBV_QP_PATH_MIG_STATE, &ibv_qp_attr::path_mig_state);
    // A packet has 24 bits for its sequence number. ibv_query_qp therefore returns only these bits.
    attr_.rq_psn &= 0xffffff;
    attr_.sq_psn &= 0xffffff;
}

void ConnectedQueuePair::query(ibv_qp_attr* attr, ibv_qp_init_attr* init_attr) {
    Lock lock(mutex_);
    *attr = attr_;
    attr->qp_state = state_;
    attr->cur_qp_state = state_;
    attr->sq_draining = state_ == IBV_QPS_SQD && (is_sending_ || !delayed_completions_.empty()) ? 1 : 0;
    *init_attr = init_attr_;
}

} // namespace gdrkit::twin::verbs
