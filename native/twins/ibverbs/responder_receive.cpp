// The functions of the responder for messages that consume a receive request: sends, and writes with immediate data.
#include <algorithm>

#include "ibverbs/connected_queue_pair.hpp"
#include "ibverbs/window.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {

wire::Response ConnectedQueuePair::execute_send(const wire::Request& request, const BounceBuffer& bounce,
                                                IncomingMessage* incoming) {
    if (!incoming->is_active) {
        if (request.chunk_offset_bytes != 0 || !consume_receive(incoming)) {
            return make_receiver_not_ready_response();
        }
        incoming->message_bytes = request.message_bytes;
        if (request.message_bytes > incoming->work.length_bytes) {
            return is_reliable() ? fail_receive(incoming, IBV_WC_LOC_LEN_ERR, wire::Status::invalid_request)
                                 : wire::make_response(wire::Status::invalid_request);
        }
    }
    if (scatter(*incoming, request, bounce) != RegionError::none) {
        return fail_receive(incoming, IBV_WC_LOC_PROT_ERR, wire::Status::operation_failed);
    }
    incoming->arrived_bytes += request.chunk_bytes;
    // If the invalidation fails, the receive request completes with IBV_WC_REM_INV_REQ_ERR, as in Soft-RoCE (its
    // responder state RESPST_ERR_INVALIDATE_RKEY).
    if (wire::is_last_chunk(request) && (request.flags & wire::flag_invalidate) != 0 &&
        !invalidate_window(request.immediate_data, get_target_domain(*incoming), qp_num_)) {
        return fail_receive(incoming, IBV_WC_REM_INV_REQ_ERR, wire::Status::operation_failed);
    }
    return wire::is_last_chunk(request) ? finish_receive(request, incoming) : wire::make_response(wire::Status::done);
}

wire::Response ConnectedQueuePair::make_receiver_not_ready_response() {
    Lock lock(mutex_);
    wire::Response response = wire::make_response(wire::Status::receiver_not_ready);
    response.rnr_timer = attr_.min_rnr_timer;
    return response;
}

std::optional<ReceiveWork> ConnectedQueuePair::take_receive(const Lock&, SharedReceiveQueue* shared_queue) {
    if (!can_receive_requests()) {
        return std::nullopt;
    }
    if (shared_queue != nullptr) {
        return shared_queue->take();
    }
    if (posted_receives_.empty()) {
        return std::nullopt;
    }
    ReceiveWork work = std::move(posted_receives_.front());
    posted_receives_.pop_front();
    return work;
}

// Begin a new incoming message: take a receive request for it. Return false if there is none.
bool ConnectedQueuePair::consume_receive(IncomingMessage* incoming) {
    Lock lock(mutex_);
    std::optional<ReceiveWork> work = take_receive(lock, incoming->shared_queue.get());
    if (!work) {
        return false;
    }
    std::shared_ptr<SharedReceiveQueue> shared_queue = std::move(incoming->shared_queue);
    *incoming = IncomingMessage{};
    incoming->shared_queue = std::move(shared_queue);
    incoming->work = std::move(*work);
    incoming->is_active = true;
    ++incoming_message_count_;
    return true;
}

void ConnectedQueuePair::return_receive(IncomingMessage* incoming, const Connection& connection) {
    Lock lock(mutex_);
    if (!incoming->is_active) {
        return;
    }
    // The message is incomplete. Its receive request goes back to the front of the queue, where the next message takes
    // it or flush() completes it. A pair in the error state flushes the request instead of returning it to a shared
    // queue.
    if (incoming->shared_queue != nullptr && state_ == IBV_QPS_ERR && connection.generation == generation_) {
        ibv_wc flush_wc{};
        flush_wc.status = IBV_WC_WR_FLUSH_ERR;
        flush_wc.opcode = IBV_WC_RECV;
        complete_receive(lock, incoming->work, incoming->shared_queue.get(), flush_wc, false);
    } else if (incoming->shared_queue != nullptr) {
        incoming->shared_queue->put_back(std::move(incoming->work));
    } else if (connection.generation == generation_) {
        posted_receives_.push_front(std::move(incoming->work));
    }
    incoming->is_active = false;
    --incoming_message_count_;
    notify_change(lock);
}

// Drop a message that an unreliable pair refuses, or for which it has no receive request. A receive request with a
// completion is not returned: deliver_receive completes it.
void ConnectedQueuePair::drop_message(const wire::Request& request, IncomingMessage* incoming,
                                      const Connection& connection) {
    if (!incoming->completion) {
        return_receive(incoming, connection);
    }
    incoming->is_dropped = request.opcode == wire::Opcode::send && !wire::is_last_chunk(request);
}

// Copy the payload of a chunk from the payload ring to the buffers of the receive request (its scatter-gather list).
RegionError ConnectedQueuePair::scatter(const IncomingMessage& incoming, const wire::Request& request,
                                        const BounceBuffer& bounce) {
    std::uint64_t skip_bytes = request.chunk_offset_bytes;
    std::size_t scattered_bytes = 0;
    ProtectionDomain* const domain = incoming.shared_queue != nullptr ? incoming.shared_queue->domain() : domain_;
    for (const ibv_sge& sge : incoming.work.sges) {
        if (skip_bytes >= sge.length) {
            skip_bytes -= sge.length;
            continue;
        }
        const std::size_t size_bytes =
            std::min<std::size_t>(sge.length - skip_bytes, request.chunk_bytes - scattered_bytes);
        if (size_bytes == 0) {
            break;
        }
        const std::uint64_t address = sge.addr + skip_bytes;
        const auto region = find_by_lkey(sge.lkey, domain, IBV_ACCESS_LOCAL_WRITE, address, size_bytes);
        const RegionError error =
            region == nullptr ? RegionError::refused
                              : region->write(address, bounce, request.payload_offset + scattered_bytes, size_bytes);
        if (error != RegionError::none) {
            return error;
        }
        scattered_bytes += size_bytes;
        skip_bytes = 0;
    }
    return RegionError::none;
}

wire::Response ConnectedQueuePair::finish_receive(const wire::Request& request, IncomingMessage* incoming) {
    ibv_wc wc{};
    wc.status = IBV_WC_SUCCESS;
    wc.opcode = request.opcode == wire::Opcode::write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
    wc.byte_len = static_cast<std::uint32_t>(request.message_bytes);
    if ((request.flags & wire::flag_immediate) != 0) {
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.imm_data = request.immediate_data;
    }
    if ((request.flags & wire::flag_invalidate) != 0) {
        wc.wc_flags = IBV_WC_WITH_INV;
        wc.invalidated_rkey = request.immediate_data;
    }
    incoming->completion = wc;
    incoming->is_solicited = (request.flags & wire::flag_solicited) != 0;
    return wire::make_response(wire::Status::done);
}

wire::Response ConnectedQueuePair::fail_receive(IncomingMessage* incoming, ibv_wc_status wc_status,
                                                wire::Status response_status) {
    ibv_wc wc{};
    wc.status = wc_status;
    wc.opcode = IBV_WC_RECV;
    incoming->completion = wc;
    return wire::make_response(response_status);
}

// Push the completion of a message whose response was published. A failed message puts the pair in the error state.
void ConnectedQueuePair::deliver_receive(IncomingMessage* incoming, const Connection& connection) {
    sleep_random_delay();
    Lock lock(mutex_);
    incoming->is_active = false;
    --incoming_message_count_;
    if (connection.generation == generation_) {
        complete_receive(lock, incoming->work, incoming->shared_queue.get(), *incoming->completion,
                         incoming->is_solicited);
        if (incoming->completion->status != IBV_WC_SUCCESS) {
            enter_error(lock, &connection);
        }
    } else if (incoming->shared_queue != nullptr) {
        // A shared queue is not reset with the pair, so it gets the request back.
        incoming->shared_queue->put_back(std::move(incoming->work));
    }
    incoming->completion.reset();
    if (state_ == IBV_QPS_ERR) {
        notify_change(lock);
    }
}

} // namespace gdrkit::twin::verbs
