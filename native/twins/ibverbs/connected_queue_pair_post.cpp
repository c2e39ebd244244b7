// Posts work requests to a connected queue pair: checks them and appends them to its queues.

#include "ibverbs/connected_queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

// post_send reserves memory for this number of requests in advance. Most posted lists are not longer.
constexpr std::size_t reserved_list_length = 16;

// Check a send request whose scatter-gather list is_valid_sge_list has accepted. Return 0, EINVAL, or EOPNOTSUPP for an
// opcode that the twin does not support.
int check_send(ibv_qp_type type, const ibv_send_wr& wr, const ibv_qp_cap& cap, std::uint64_t length_bytes) {
    if (!carries_data(wr.opcode) && !is_atomic(wr.opcode) && !changes_keys(wr.opcode) &&
        wr.opcode != IBV_WR_RDMA_READ) {
        return EOPNOTSUPP;
    }
    const bool is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
    // An unreliable pair (UC) gets no data back from its peer, so it has neither reads nor atomic operations.
    const bool is_valid =
        (type != IBV_QPT_UC || carries_data(wr.opcode) || changes_keys(wr.opcode)) &&
        (wr.send_flags & ~(IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE)) == 0 &&
        (!is_inline || (carries_data(wr.opcode) && length_bytes <= cap.max_inline_data)) &&
        (!is_atomic(wr.opcode) || length_bytes == 8);
    return is_valid ? 0 : EINVAL;
}

} // namespace

int ConnectedQueuePair::post_send(ibv_send_wr* list, ibv_send_wr** bad_wr) {
    // An XRC receive queue pair has no send queue.
    if (type() == IBV_QPT_XRC_RECV) {
        *bad_wr = list;
        return EINVAL;
    }
    // Prepare the requests before taking the lock, because the requester thread needs the lock for every response.
    std::vector<SendWork> prepared_sends;
    prepared_sends.reserve(reserved_list_length);
    std::uint64_t posted_bytes = 0;
    int error = 0;
    ibv_send_wr* wr = list;
    for (; wr != nullptr; wr = wr->next) {
        error = is_valid_sge_list(wr->sg_list, wr->num_sge, init_attr_.cap.max_send_sge) ? 0 : EINVAL;
        const std::uint64_t length_bytes = error == 0 ? count_total_bytes(wr->sg_list, wr->num_sge) : 0;
        error = error == 0 ? check_send(type(), *wr, init_attr_.cap, length_bytes) : error;
        if (error != 0) {
            break;
        }
        prepared_sends.push_back(to_send_work(*wr, init_attr_.sq_sig_all != 0, length_bytes));
        // The binding is null if the memory window or the region of the request is not an object of this library.
        if (wr->opcode == IBV_WR_BIND_MW && prepared_sends.back().binding == nullptr) {
            prepared_sends.pop_back();
            error = EINVAL;
            break;
        }
        posted_bytes += length_bytes;
        if (type() == IBV_QPT_XRC_SEND) {
            prepared_sends.back().remote_srq_number = wr->qp_type.xrc.remote_srqn;
        }
    }
    if (error != 0) {
        *bad_wr = wr;
    }
    Lock lock(mutex_);
    if (!prepared_sends.empty() && state_ != IBV_QPS_RTS && state_ != IBV_QPS_SQD && state_ != IBV_QPS_ERR) {
        *bad_wr = list;
        return EINVAL;
    }
    wr = list;
    for (SendWork& work : prepared_sends) {
        if (send_queue_slots_->used_count >= init_attr_.cap.max_send_wr) {
            *bad_wr = wr;
            error = ENOMEM;
            break;
        }
        ++send_queue_slots_->used_count;
        posted_sends_.push_back(std::move(work));
        wr = wr->next;
    }
    if (!try_send_in_caller(&lock, posted_bytes)) {
        notify_change(lock);
    }
    return error;
}

std::uint32_t ConnectedQueuePair::count_free_send_slots() {
    Lock lock(mutex_);
    return init_attr_.cap.max_send_wr - send_queue_slots_->used_count;
}

int ConnectedQueuePair::post_receive(const ibv_recv_wr& wr) {
    const bool has_receive_queue =
        shared_receive_queue_ == nullptr && type() != IBV_QPT_XRC_SEND && type() != IBV_QPT_XRC_RECV;
    if (!has_receive_queue || !is_valid_sge_list(wr.sg_list, wr.num_sge, init_attr_.cap.max_recv_sge)) {
        return EINVAL;
    }
    Lock lock(mutex_);
    if (state_ == IBV_QPS_RESET) {
        return EINVAL;
    }
    if (receive_queue_slots_->used_count >= init_attr_.cap.max_recv_wr) {
        return ENOMEM;
    }
    ++receive_queue_slots_->used_count;
    posted_receives_.push_back(to_receive_work(wr));
    if (state_ == IBV_QPS_ERR) {
        notify_change(lock); // wakes the requester thread, which flushes the request
    }
    return 0;
}

} // namespace gdrkit::twin::verbs
