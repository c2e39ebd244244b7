// Messages that use up a receive: sends, and writes that tell of themselves.
#include <algorithm>

#include "ibverbs/queue_pair.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {

wire::Response QueuePair::answer_send(const wire::Request& request, const Bounce& bounce, Arriving* arriving,
                                      const Connection& own) {
    if (!arriving->active) {
        if (!take_receive(arriving)) {
            return not_ready();
        }
        arriving->message_bytes = request.message_bytes;
        if (request.message_bytes > arriving->work.length_bytes) {
            return fail_receive(arriving, IBV_WC_LOC_LEN_ERR, wire::Answer::invalid_request, own);
        }
    }
    if (scatter(arriving->work, request, bounce) != RegionError::none) {
        return fail_receive(arriving, IBV_WC_LOC_PROT_ERR, wire::Answer::operation_failed, own);
    }
    arriving->arrived_bytes += request.chunk_bytes;
    return wire::last_chunk(request) ? finish_receive(request, arriving, own) : wire::response_of(wire::Answer::done);
}

wire::Response QueuePair::not_ready() {
    Lock lock(mutex_);
    wire::Response response = wire::response_of(wire::Answer::receiver_not_ready);
    response.rnr_timer = attr_.min_rnr_timer;
    return response;
}

bool QueuePair::take_receive(Arriving* arriving) {
    Lock lock(mutex_);
    if (receives_.empty() || !receives_requests()) {
        return false;
    }
    *arriving = Arriving{};
    arriving->work = std::move(receives_.front());
    receives_.pop_front();
    arriving->active = true;
    ++arriving_count_;
    return true;
}

void QueuePair::give_back(Arriving* arriving, const Connection& own) {
    Lock lock(mutex_);
    if (!arriving->active) {
        return;
    }
    // The message never ended, so the receive is the first again, for the next message or to be flushed.
    if (own.generation == generation_) {
        receives_.push_front(std::move(arriving->work));
    }
    arriving->active = false;
    --arriving_count_;
    ring(lock);
}

RegionError QueuePair::scatter(const ReceiveWork& work, const wire::Request& request, const Bounce& bounce) {
    std::uint64_t skip = request.chunk_offset_bytes;
    std::size_t moved = 0;
    for (const ibv_sge& piece : work.pieces) {
        if (skip >= piece.length) {
            skip -= piece.length;
            continue;
        }
        const std::size_t part = std::min<std::size_t>(piece.length - skip, request.chunk_bytes - moved);
        if (part == 0) {
            break;
        }
        const std::uint64_t address = piece.addr + skip;
        const auto region = find_local(piece.lkey, domain_, IBV_ACCESS_LOCAL_WRITE, address, part);
        const RegionError error =
            region == nullptr ? RegionError::refused : region->write(address, bounce, request.payload_at + moved, part);
        if (error != RegionError::none) {
            return error;
        }
        moved += part;
        skip = 0;
    }
    return RegionError::none;
}

wire::Response QueuePair::finish_receive(const wire::Request& request, Arriving* arriving, const Connection& own) {
    ibv_wc wc{};
    wc.status = IBV_WC_SUCCESS;
    wc.opcode = request.opcode == wire::Opcode::write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
    wc.byte_len = static_cast<std::uint32_t>(request.message_bytes);
    if ((request.flags & wire::flag_immediate) != 0) {
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.imm_data = request.immediate;
    }
    be_late();
    Lock lock(mutex_);
    arriving->active = false;
    --arriving_count_;
    if (own.generation == generation_) {
        complete_receive(lock, arriving->work, wc, (request.flags & wire::flag_solicited) != 0);
    }
    ring(lock);
    return wire::response_of(wire::Answer::done);
}

wire::Response QueuePair::fail_receive(Arriving* arriving, ibv_wc_status status, wire::Answer answer,
                                       const Connection& own) {
    ibv_wc wc{};
    wc.status = status;
    wc.opcode = IBV_WC_RECV;
    be_late();
    Lock lock(mutex_);
    arriving->active = false;
    --arriving_count_;
    if (own.generation == generation_) {
        complete_receive(lock, arriving->work, wc, false);
        enter_error(lock, &own);
    }
    ring(lock);
    return wire::response_of(answer);
}

} // namespace gdrkit::twin::verbs
