#include <cstring>

#include "ibverbs/handle.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Room for so many requests of a list is made at once.
constexpr std::size_t list_usual = 16;

bool is_atomic(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

bool carries_data(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE ||
           opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

std::uint64_t total_of(const ibv_sge* pieces, int count) {
    std::uint64_t total = 0;
    for (int index = 0; index < count; ++index) {
        total += pieces[index].length;
    }
    return total;
}

bool good_pieces(const ibv_sge* pieces, int count, std::uint32_t most) {
    return count >= 0 && static_cast<std::uint32_t>(count) <= most && (count == 0 || pieces != nullptr);
}

// The list of pieces is good.
int check(const ibv_send_wr& wr, const ibv_qp_cap& cap, std::uint64_t total) {
    if (!carries_data(wr.opcode) && !is_atomic(wr.opcode) && wr.opcode != IBV_WR_RDMA_READ) {
        return EOPNOTSUPP;
    }
    const bool is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
    const bool good =
        (wr.send_flags & ~(IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE)) == 0 &&
        (!is_inline || (carries_data(wr.opcode) && total <= cap.max_inline_data)) &&
        (!is_atomic(wr.opcode) || total == 8);
    return good ? 0 : EINVAL;
}

std::vector<std::byte> gather_now(const ibv_send_wr& wr, std::uint64_t total) {
    std::vector<std::byte> data(total);
    std::size_t at = 0;
    for (int index = 0; index < wr.num_sge; ++index) {
        const ibv_sge& piece = wr.sg_list[index];
        if (piece.length > 0) {
            std::memcpy(data.data() + at, reinterpret_cast<const void*>(piece.addr), piece.length);
            at += piece.length;
        }
    }
    return data;
}

SendWork take_over(const ibv_send_wr& wr, bool all_signaled, std::uint64_t total) {
    SendWork work;
    work.wr_id = wr.wr_id;
    work.opcode = wr.opcode;
    work.fenced = (wr.send_flags & IBV_SEND_FENCE) != 0;
    work.signaled = all_signaled || (wr.send_flags & IBV_SEND_SIGNALED) != 0;
    work.solicited = (wr.send_flags & IBV_SEND_SOLICITED) != 0;
    work.is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
    work.immediate = wr.imm_data;
    work.length_bytes = total;
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
        work.data = gather_now(wr, total);
    } else {
        work.pieces.assign(wr.sg_list, static_cast<std::size_t>(wr.num_sge));
    }
    return work;
}

} // namespace

int QueuePair::post_send(ibv_send_wr* list, ibv_send_wr** bad) {
    // What can be done without the lock: the requester takes it for every answer.
    std::vector<SendWork> works;
    works.reserve(list_usual);
    int error = 0;
    ibv_send_wr* wr = list;
    for (; wr != nullptr; wr = wr->next) {
        error = good_pieces(wr->sg_list, wr->num_sge, init_.cap.max_send_sge) ? 0 : EINVAL;
        const std::uint64_t total = error == 0 ? total_of(wr->sg_list, wr->num_sge) : 0;
        error = error == 0 ? check(*wr, init_.cap, total) : error;
        if (error != 0) {
            break;
        }
        works.push_back(take_over(*wr, init_.sq_sig_all != 0, total));
    }
    if (error != 0) {
        *bad = wr;
    }
    Lock lock(mutex_);
    if (!works.empty() && state_ != IBV_QPS_RTS && state_ != IBV_QPS_SQD && state_ != IBV_QPS_ERR) {
        *bad = list;
        return EINVAL;
    }
    wr = list;
    for (SendWork& work : works) {
        if (send_slots_->taken >= init_.cap.max_send_wr) {
            *bad = wr;
            error = ENOMEM;
            break;
        }
        ++send_slots_->taken;
        sends_.push_back(std::move(work));
        wr = wr->next;
    }
    ring(lock);
    return error;
}

int QueuePair::post_receive(const ibv_recv_wr& wr) {
    if (!good_pieces(wr.sg_list, wr.num_sge, init_.cap.max_recv_sge)) {
        return EINVAL;
    }
    Lock lock(mutex_);
    if (state_ == IBV_QPS_RESET) {
        return EINVAL;
    }
    if (receive_slots_->taken >= init_.cap.max_recv_wr) {
        return ENOMEM;
    }
    ++receive_slots_->taken;
    ReceiveWork work;
    work.wr_id = wr.wr_id;
    work.length_bytes = total_of(wr.sg_list, wr.num_sge);
    work.pieces.assign(wr.sg_list, wr.sg_list + wr.num_sge);
    receives_.push_back(std::move(work));
    ring(lock);
    return 0;
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr) {
    const auto fault = call("ibv_post_send");
    const int error = fault ? *fault : alive("ibv_qp", qp) ? 0 : EINVAL;
    if (error != 0) {
        *bad_wr = wr;
        return error;
    }
    return find_pair(qp)->model->post_send(wr, bad_wr);
}

int post_receive(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
    const auto fault = call("ibv_post_recv");
    const int error = fault ? *fault : alive("ibv_qp", qp) ? 0 : EINVAL;
    if (error != 0) {
        *bad_wr = wr;
        return error;
    }
    for (QueuePair& pair = *find_pair(qp)->model; wr != nullptr; wr = wr->next) {
        if (const int refused = pair.post_receive(*wr); refused != 0) {
            *bad_wr = wr;
            return refused;
        }
    }
    return 0;
}

} // namespace gdrkit::twin::verbs
