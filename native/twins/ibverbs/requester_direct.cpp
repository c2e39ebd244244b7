// If the responder has granted access to a region (grants.hpp), the requester carries out writes and reads directly: it
// copies between the memory of the two processes, without a thread of the responder. Without a grant, or if the copy
// fails, the requester submits the request to the responder, which determines the status.
#include <algorithm>
#include <array>

#include "ibverbs/connected_queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

// One copy under a grant has at most this number of bytes, so that a revocation of the grant does not wait long.
constexpr std::uint64_t max_segment_bytes = 1U << 20;
// A list of requests that is copied by one call has at most this number of bytes.
constexpr std::uint64_t max_list_bytes = 64U << 10;
// The system may reuse the process id of a peer that has ended. So a copy first checks the connection if the last check
// is older than this interval.
constexpr std::chrono::milliseconds peer_check_interval{1};

// Return the range of the peer's memory that the request needs. If the request is not a copy of one range, `access` is
// 0, and the requester cannot carry it out itself.
PeerRange get_peer_range(const SendWork& work) {
    const bool copies_one_range = work.length_bytes > 0 && (work.is_inline || work.sges.size() == 1);
    unsigned access = 0;
    if (copies_one_range && work.opcode == IBV_WR_RDMA_WRITE) {
        access = IBV_ACCESS_REMOTE_WRITE;
    } else if (copies_one_range && work.opcode == IBV_WR_RDMA_READ) {
        access = IBV_ACCESS_REMOTE_READ;
    }
    return {work.rkey, access, work.remote_address, work.length_bytes};
}

// Return the access that the local region must permit.
unsigned choose_local_access(const PeerRange& range) {
    return range.access == IBV_ACCESS_REMOTE_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
}

// Return the memory of this process that the request copies, as an address in its region.
iovec get_local_range(const SendWork& work) {
    return {reinterpret_cast<void*>(work.sges.front().addr), work.length_bytes};
}

// Return whether the chunk belongs to a request that the requester could carry out itself with a grant.
bool is_copyable(const wire::Request& request) {
    return request.opcode == wire::Opcode::read ||
           (request.opcode == wire::Opcode::write && (request.flags & wire::flag_immediate) == 0);
}

} // namespace

bool ConnectedQueuePair::has_grant(const SendWork& work) {
    const PeerRange range = get_peer_range(work);
    return peer_memory_ != nullptr && range.access != 0 && peer_memory_->is_granted(range);
}

// Return whether the next request shall wait for the responses to the chunks in flight, so that the requester can then
// copy it directly. The request waits only for writes and reads. If it waited for sends and atomic requests too, a
// program that alternates them with writes would wait for each response.
bool ConnectedQueuePair::must_drain_for_copy(const SendWork& next_send) {
    Fifo<InFlightChunk>& chunks_in_flight = requester_state_.chunks_in_flight;
    if (chunks_in_flight.empty() || !has_grant(next_send)) {
        return false;
    }
    for (std::size_t index = 0; index < chunks_in_flight.size(); ++index) {
        if (!is_copyable(chunks_in_flight[index].request)) {
            return false;
        }
    }
    return true;
}

bool ConnectedQueuePair::is_peer_alive() {
    RequesterState& requester = requester_state_;
    if (const auto now = Clock::now(); now - requester.last_peer_check_at >= peer_check_interval) {
        requester.last_peer_check_at = now;
        requester.is_peer_gone |= !link_->consume_wakes(peer_socket_.get());
    }
    return !requester.is_peer_gone;
}

// Carry out the last started request without the responder. Return false if it must be submitted to the responder.
bool ConnectedQueuePair::copy_directly(const SendWork& work, const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    // A copy must not overtake earlier requests.
    if (!requester.chunks_in_flight.empty() || requester.started_sends.size() != 1 || !has_grant(work) ||
        !is_peer_alive()) {
        return false;
    }
    if (copy_requests_together(work, attr)) {
        return true;
    }
    const PeerRange range = get_peer_range(work);
    for (std::uint64_t offset = 0; offset < range.size_bytes; offset += max_segment_bytes) {
        if (offset > 0) {
            Lock lock(mutex_);
            if (is_interrupted()) {
                requester.local_error = IBV_WC_WR_FLUSH_ERR;
                return true;
            }
        }
        const std::uint64_t segment_bytes = std::min(range.size_bytes - offset, max_segment_bytes);
        if (!copy_segment(work, {range.rkey, range.access, range.address + offset, segment_bytes}, offset)) {
            return false;
        }
    }
    finish_copied_request(range, attr);
    return true;
}

// Copy the data of the last started request and of the queued requests after it by one system call, if they are small,
// have the same type and keys, and use one local region. Return false if fewer than two requests meet these conditions
// or the copy failed.
bool ConnectedQueuePair::copy_requests_together(const SendWork& work, const ibv_qp_attr& attr) {
    Fifo<SendWork>& queued_sends = requester_state_.queued_sends;
    if (queued_sends.empty() || work.is_inline || has_fault_rule(work.opcode)) {
        return false;
    }
    std::array<PeerRange, PeerMemory::max_list_length> ranges;
    std::array<iovec, PeerMemory::max_list_length> local_ranges;
    ranges[0] = get_peer_range(work);
    local_ranges[0] = get_local_range(work);
    Region* const region = find_local_region(work.sges.front(), choose_local_access(ranges[0]));
    std::uint64_t list_bytes = ranges[0].size_bytes;
    std::size_t request_count = 1;
    for (; region != nullptr && request_count < ranges.size() && request_count <= queued_sends.size();
         ++request_count) {
        const SendWork& next_send = queued_sends[request_count - 1];
        ranges[request_count] = get_peer_range(next_send);
        list_bytes += ranges[request_count].size_bytes;
        if (next_send.is_inline || list_bytes > max_list_bytes || ranges[request_count].access != ranges[0].access ||
            ranges[request_count].rkey != ranges[0].rkey || next_send.sges.front().lkey != work.sges.front().lkey ||
            !region->covers(next_send.sges.front().addr, next_send.sges.front().length)) {
            break;
        }
        local_ranges[request_count] = get_local_range(next_send);
    }
    if (request_count < 2 || !region->is_mapped() ||
        region->access_mapped(std::span(local_ranges).first(request_count), [&](std::span<const iovec> mapped_ranges) {
            return peer_memory_->copy_list(std::span(ranges).first(request_count), mapped_ranges);
        }) != RegionError::none) {
        return false;
    }
    finish_copied_request(ranges[0], attr);
    for (std::size_t index = 1; index < request_count && !requester_state_.first_send_error; ++index) {
        requester_state_.started_sends.push_back(std::move(queued_sends.front()));
        queued_sends.pop_front();
        count_without_fault(requester_state_.started_sends.front().opcode);
        finish_copied_request(ranges[index], attr);
    }
    return true;
}

// Count the first started request, whose data was copied, and move it to the finished requests.
void ConnectedQueuePair::finish_copied_request(const PeerRange& range, const ibv_qp_attr& attr) {
    peer_memory_->count_request(range);
    requester_state_.copied_bytes += range.size_bytes;
    finish_first_started(attr);
}

bool ConnectedQueuePair::copy_segment(const SendWork& work, const PeerRange& range, std::uint64_t offset) {
    if (work.is_inline) {
        std::byte* const inline_data = const_cast<std::byte*>(work.inline_data.data()) + offset;
        return peer_memory_->copy(range, inline_data, &parallel_copy_);
    }
    const ibv_sge& sge = work.sges.front();
    Region* const region = find_local_region(sge, choose_local_access(range));
    return region != nullptr && region->is_mapped() &&
           region->access_mapped(sge.addr + offset, [&](std::byte* address) {
               return peer_memory_->copy(range, address, &parallel_copy_);
           }) == RegionError::none;
}

// Move the first started request, which was carried out, to the finished requests. If the fault plan injects an error,
// keep the request started and set first_send_error instead.
void ConnectedQueuePair::finish_first_started(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    if (const auto fault = find_fault_of_landed_request(requester.started_sends.front().opcode, attr)) {
        requester.first_send_error = static_cast<ibv_wc_status>(*fault);
        return;
    }
    requester.finished_sends.push_back(std::move(requester.started_sends.front()));
    requester.started_sends.pop_front();
}

} // namespace gdrkit::twin::verbs
