// Posting of send and receive requests: checks a list of work requests and appends them to the queues of a queue pair.

#include <cstring>

#include "ibverbs/handle.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A posted list usually has at most this number of requests. Memory for them is reserved in advance.
constexpr std::size_t reserved_list_length = 16;

bool is_atomic(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

bool carries_data(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE ||
           opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

std::uint64_t total_length_bytes(const ibv_sge* sges, int count) {
    std::uint64_t length_bytes = 0;
    for (int index = 0; index < count; ++index) {
        length_bytes += sges[index].length;
    }
    return length_bytes;
}

bool is_valid_sge_list(const ibv_sge* sges, int count, std::uint32_t max_count) {
    return count >= 0 && static_cast<std::uint32_t>(count) <= max_count && (count == 0 || sges != nullptr);
}

// Check a send request after is_valid_sge_list has accepted its list. Return 0, EINVAL or EOPNOTSUPP.
int check_send(const ibv_send_wr& wr, const ibv_qp_cap& cap, std::uint64_t length_bytes) {
    if (!carries_data(wr.opcode) && !is_atomic(wr.opcode) && wr.opcode != IBV_WR_RDMA_READ) {
        return EOPNOTSUPP;
    }
    const bool is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
    const bool is_valid =
        (wr.send_flags & ~(IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE)) == 0 &&
        (!is_inline || (carries_data(wr.opcode) && length_bytes <= cap.max_inline_data)) &&
        (!is_atomic(wr.opcode) || length_bytes == 8);
    return is_valid ? 0 : EINVAL;
}

std::vector<std::byte> copy_inline_data(const ibv_send_wr& wr, std::uint64_t length_bytes) {
    std::vector<std::byte> data(length_bytes);
    std::size_t offset = 0;
    for (int index = 0; index < wr.num_sge; ++index) {
        const ibv_sge& sge = wr.sg_list[index];
        if (sge.length > 0) {
            std::memcpy(data.data() + offset, reinterpret_cast<const void*>(sge.addr), sge.length);
            offset += sge.length;
        }
    }
    return data;
}

SendWork to_send_work(const ibv_send_wr& wr, bool all_signaled, std::uint64_t length_bytes) {
    SendWork work;
    work.wr_id = wr.wr_id;
    work.opcode = wr.opcode;
    work.is_fenced = (wr.send_flags & IBV_SEND_FENCE) != 0;
    work.is_signaled = all_signaled || (wr.send_flags & IBV_SEND_SIGNALED) != 0;
    work.is_solicited = (wr.send_flags & IBV_SEND_SOLICITED) != 0;
    work.is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
    work.immediate = wr.imm_data;
    work.length_bytes = length_bytes;
    if (is_atomic(wr.opcode)) {
        work.remote_address = wr.wr.atomic.remote_addr;
        work.rkey = wr.wr.atomic.rkey;
        work.compare_or_add = wr.wr.atomic.compare_add;
        work.swap = wr.wr.atomic.swap;
    } else {
        work.remote_address = wr.wr.rdma.remote_addr;
        work.rkey = wr.wr.rdma.rkey;
    }
    if (work.is_inline) {
        work.inline_data = copy_inline_data(wr, length_bytes);
    } else {
        work.sges.assign(wr.sg_list, static_cast<std::size_t>(wr.num_sge));
    }
    return work;
}

} // namespace

int QueuePair::post_send(ibv_send_wr* list, ibv_send_wr** bad_wr) {
    // Prepare the requests before taking the lock, which the requester thread takes for every response.
    std::vector<SendWork> works;
    works.reserve(reserved_list_length);
    int error = 0;
    ibv_send_wr* wr = list;
    for (; wr != nullptr; wr = wr->next) {
        error = is_valid_sge_list(wr->sg_list, wr->num_sge, init_attr_.cap.max_send_sge) ? 0 : EINVAL;
        const std::uint64_t length_bytes = error == 0 ? total_length_bytes(wr->sg_list, wr->num_sge) : 0;
        error = error == 0 ? check_send(*wr, init_attr_.cap, length_bytes) : error;
        if (error != 0) {
            break;
        }
        works.push_back(to_send_work(*wr, init_attr_.sq_sig_all != 0, length_bytes));
    }
    if (error != 0) {
        *bad_wr = wr;
    }
    Lock lock(mutex_);
    if (!works.empty() && state_ != IBV_QPS_RTS && state_ != IBV_QPS_SQD && state_ != IBV_QPS_ERR) {
        *bad_wr = list;
        return EINVAL;
    }
    wr = list;
    for (SendWork& work : works) {
        if (send_queue_slots_->used >= init_attr_.cap.max_send_wr) {
            *bad_wr = wr;
            error = ENOMEM;
            break;
        }
        ++send_queue_slots_->used;
        sends_.push_back(std::move(work));
        wr = wr->next;
    }
    notify_change(lock);
    return error;
}

int QueuePair::post_receive(const ibv_recv_wr& wr) {
    if (!is_valid_sge_list(wr.sg_list, wr.num_sge, init_attr_.cap.max_recv_sge)) {
        return EINVAL;
    }
    Lock lock(mutex_);
    if (state_ == IBV_QPS_RESET) {
        return EINVAL;
    }
    if (receive_queue_slots_->used >= init_attr_.cap.max_recv_wr) {
        return ENOMEM;
    }
    ++receive_queue_slots_->used;
    ReceiveWork work;
    work.wr_id = wr.wr_id;
    work.length_bytes = total_length_bytes(wr.sg_list, wr.num_sge);
    work.sges.assign(wr.sg_list, wr.sg_list + wr.num_sge);
    receives_.push_back(std::move(work));
    notify_change(lock);
    return 0;
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr) {
    const auto fault = injected_fault("ibv_post_send");
    const int error = fault ? *fault : is_alive("ibv_qp", qp) ? 0 : EINVAL;
    if (error != 0) {
        *bad_wr = wr;
        return error;
    }
    return qp_handle_of(qp)->model->post_send(wr, bad_wr);
}

int post_receive(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
    const auto fault = injected_fault("ibv_post_recv");
    int error = fault ? *fault : is_alive("ibv_qp", qp) ? 0 : EINVAL;
    if (error != 0) {
        *bad_wr = wr;
        return error;
    }
    for (QueuePair& pair = *qp_handle_of(qp)->model; wr != nullptr; wr = wr->next) {
        error = pair.post_receive(*wr);
        if (error != 0) {
            *bad_wr = wr;
            return error;
        }
    }
    return 0;
}

} // namespace gdrkit::twin::verbs
