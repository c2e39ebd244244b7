// The part of the requester thread that runs without the queue pair's lock: it starts send requests in order, submits
// their chunks while there is space in the rings, and handles the responses, which arrive in the same order.
#include <algorithm>
#include <cstring>

#include "ibverbs/chunk_sges.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Publish after this many bytes, so that the peer can start with the first requests while others are prepared.
constexpr std::uint64_t publish_after_bytes = 64U << 10;

// Times of the min_rnr_timer codes, in microseconds.
constexpr std::uint32_t rnr_time_us[32] = {
    655360, 10,   20,   30,   40,    60,    80,    120,   160,   240,   320,   480,    640,    960,    1280,   1920,
    2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

bool returns_data(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

wire::Opcode wire_opcode(ibv_wr_opcode opcode) {
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return wire::Opcode::write;
    case IBV_WR_RDMA_READ:
        return wire::Opcode::read;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return wire::Opcode::compare_and_swap;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return wire::Opcode::fetch_and_add;
    default:
        return wire::Opcode::send;
    }
}

wire::Request first_request(const SendWork& work) {
    wire::Request request{};
    request.magic = wire::magic;
    request.opcode = wire_opcode(work.opcode);
    if (work.opcode == IBV_WR_SEND_WITH_IMM || work.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        request.flags |= wire::flag_immediate;
    }
    if (work.solicited) {
        request.flags |= wire::flag_solicited;
    }
    request.remote_address = work.remote_address;
    request.message_bytes = work.length_bytes;
    request.rkey = work.rkey;
    request.immediate = work.immediate;
    request.compare_or_add = work.compare_or_add;
    request.swap = work.swap;
    return request;
}

ibv_wc_status completion_status_of(wire::Status answer) {
    switch (answer) {
    case wire::Status::invalid_request:
        return IBV_WC_REM_INV_REQ_ERR;
    case wire::Status::access_refused:
        return IBV_WC_REM_ACCESS_ERR;
    default:
        return IBV_WC_REM_OP_ERR;
    }
}

// The two fault points of one type of request.
struct FaultSites {
    FaultSite before; // checked before the request is carried out
    FaultSite landed; // checked after its bytes have arrived

    FaultSites(std::string_view first, std::string_view second) : before(first), landed(second) {}
};

// Return the fault points of a request; nullptr if a fault plan has no name for it.
FaultSites* fault_sites(ibv_wr_opcode opcode) {
    static FaultSites send("wc.send", "wc.send.landed"), write("wc.rdma_write", "wc.rdma_write.landed"),
        read("wc.rdma_read", "wc.rdma_read.landed");
    switch (wire_opcode(opcode)) {
    case wire::Opcode::send:
        return &send;
    case wire::Opcode::write:
        return &write;
    case wire::Opcode::read:
        return &read;
    default:
        return nullptr;
    }
}

bool needs_receive(const wire::Request& request) {
    return request.opcode == wire::Opcode::send ? request.chunk_offset_bytes == 0
                                                : (request.flags & wire::flag_immediate) != 0 && last_chunk(request);
}

} // namespace

bool QueuePair::make_progress(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    const bool submitted = submit_requests(attr);
    const bool handled = handle_responses(attr);
    if (!requester.error && requester.in_flight.empty() && requester.local_error) {
        requester.error = requester.local_error;
    }
    if (!requester.error && requester.peer_gone && !requester.in_flight.empty() &&
        link_->responded() == requester.responded) {
        requester.error = connection_lost_status();
    }
    return submitted || handled || requester.error;
}

bool QueuePair::submit_requests(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    bool any = false;
    while (!requester.local_error && !requester.error && !requester.peer_gone &&
           (requester.chunk_pending || !requester.queued.empty())) {
        if ((requester.rnr_possible && !requester.in_flight.empty()) ||
            (requester.retry_at && Clock::now() < *requester.retry_at)) {
            break;
        }
        requester.rnr_possible = false;
        requester.retry_at.reset();
        if ((!requester.chunk_pending && !start_next(attr)) || (!requester.local_error && !submit_chunk())) {
            break;
        }
        any = true;
    }
    if (requester.submitted != requester.published) {
        publish();
    }
    return any;
}

// Start the next queued request. Return false if it must wait for earlier ones.
bool QueuePair::start_next(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    FaultSites* const sites = fault_sites(requester.queued.front().opcode);
    FaultSite* const site = sites != nullptr ? &sites->before : nullptr;
    if (must_wait_for_earlier(requester.queued.front(), site)) {
        return false;
    }
    const SendWork& work = requester.started.push_back(std::move(requester.queued.front()));
    requester.queued.pop_front();
    if (const ibv_wc_status status = prepare(work, site, attr); status != IBV_WC_SUCCESS) {
        requester.local_error = status;
        return true;
    }
    requester.chunk_pending = true;
    requester.next_chunk = first_request(work);
    requester.rnr_retries_left = attr.rnr_retry;
    requester.data_responses_pending += returns_data(work.opcode) ? 1 : 0;
    return true;
}

// A request with a fault rule is carried out alone, so that its fault does not affect earlier requests.
bool QueuePair::must_wait_for_earlier(const SendWork& next, FaultSite* site) {
    const RequesterState& requester = requester_state_;
    if (next.fenced && requester.data_responses_pending > 0) {
        return true;
    }
    if (site == nullptr || !site->has_rule()) {
        return false;
    }
    Lock lock(mutex_);
    return !requester.started.empty() || !requester.finished.empty() || !delayed_completions_.empty();
}

ibv_wc_status QueuePair::prepare(const SendWork& work, FaultSite* site, const ibv_qp_attr& attr) {
    if (site != nullptr) {
        if (const auto fault = injected_fault(site)) {
            return static_cast<ibv_wc_status>(*fault);
        }
    }
    if (returns_data(work.opcode) && attr.max_rd_atomic == 0) {
        return IBV_WC_LOC_QP_OP_ERR;
    }
    if (const ibv_wc_status status = check_local_access(work); status != IBV_WC_SUCCESS) {
        return status;
    }
    return connect_to_peer(attr);
}

// Reserve pipe pages or payload space for the next chunk. Return false if there is no space at present.
bool QueuePair::reserve_payload(const SendWork& work, wire::Request* request, std::uint32_t* pages) {
    *pages = pages_to_splice(work, *request);
    if (*pages > 0) {
        request->flags |= wire::flag_piped;
        request->payload_offset = 0;
        return requester_state_.pipe_pages_used + *pages <= link_->pipe().max_pages();
    }
    request->flags &= static_cast<std::uint16_t>(~wire::flag_piped);
    const auto at = link_->reserve(request->chunk_bytes);
    request->payload_offset = at.value_or(0);
    return at.has_value();
}

// Submit the next chunk. Return false if there is no space at present.
bool QueuePair::submit_chunk() {
    RequesterState& requester = requester_state_;
    const SendWork& work = requester.started.back();
    wire::Request& request = requester.next_chunk;
    const std::uint64_t remaining_bytes = work.length_bytes - request.chunk_offset_bytes;
    request.chunk_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(remaining_bytes, max_chunk_bytes));
    std::uint32_t pages = 0;
    if (requester.in_flight.size() == Link::slot_count || !reserve_payload(work, &request, &pages)) {
        return false;
    }
    const bool splice_later = pages > 0 && can_queue_splice(work, request);
    if (splice_later) {
        queue_splice(work);
    } else {
        flush_splices();
        if (requester.local_error) {
            return true;
        }
    }
    if (wire::carries_payload(request.opcode)) {
        const ibv_wc_status status = splice_later ? IBV_WC_SUCCESS
                                     : pages > 0  ? splice_payload(work, request)
                                                  : copy_payload(work, request, false);
        if (status != IBV_WC_SUCCESS) {
            // The chunk is not published, and nothing more is submitted before the connection ends.
            requester.local_error = status;
            return true;
        }
    }
    requester.pipe_pages_used += pages;
    if (requester.in_flight.empty()) {
        requester.last_response = Clock::now();
    }
    requester.in_flight.push_back({request, link_->reserved(), pages});
    link_->put_request(requester.submitted++, request);
    requester.rnr_possible = needs_receive(request);
    requester.unpublished_bytes += request.chunk_bytes;
    request.chunk_offset_bytes += request.chunk_bytes;
    requester.chunk_pending = request.chunk_offset_bytes < work.length_bytes;
    if (requester.unpublished_bytes >= publish_after_bytes) {
        publish();
    }
    return true;
}

void QueuePair::publish() {
    RequesterState& requester = requester_state_;
    flush_splices();
    requester.published = requester.submitted;
    requester.unpublished_bytes = 0;
    requester.peer_gone |= !link_->publish_requests(requester.published, peer_.get());
}

bool QueuePair::handle_responses(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    bool any = false;
    while (!requester.error && !requester.in_flight.empty() && link_->responded() != requester.responded) {
        any = true;
        const wire::Response response = link_->response(requester.responded);
        if (link_->responded() - requester.responded > requester.in_flight.size() ||
            !wire::well_formed(response, requester.in_flight.front().request)) {
            requester.error = connection_lost_status();
        } else {
            handle_response(response, attr);
        }
    }
    if (any) {
        requester.last_response = Clock::now();
    }
    return any;
}

void QueuePair::handle_response(const wire::Response& response, const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    const InFlightChunk chunk = requester.in_flight.front();
    requester.in_flight.pop_front();
    ++requester.responded;
    requester.pipe_pages_used -= chunk.pipe_pages;
    if (response.status == wire::Status::receiver_not_ready) {
        // The refused chunk was the last that was submitted, so it is the next one again.
        requester.next_chunk = chunk.request;
        requester.chunk_pending = true;
        link_->release(chunk.release_mark);
        // The retry count 7 means unlimited retries.
        if (attr.rnr_retry != 7 && requester.rnr_retries_left-- == 0) {
            requester.error = IBV_WC_RNR_RETRY_EXC_ERR;
        } else {
            requester.retry_at = Clock::now() + std::chrono::microseconds(rnr_time_us[response.rnr_timer]);
        }
        return;
    }
    if (response.status != wire::Status::done) {
        requester.error = completion_status_of(response.status);
        return;
    }
    SendWork& work = requester.started.front();
    if (returns_data(work.opcode)) {
        if (chunk.request.opcode != wire::Opcode::read) {
            std::memcpy(link_->memory().at(chunk.request.payload_offset), &response.original, sizeof response.original);
        }
        if (const ibv_wc_status status = copy_payload(work, chunk.request, true); status != IBV_WC_SUCCESS) {
            requester.error = status;
            return;
        }
    }
    if (chunk.pipe_pages == 0) {
        link_->release(chunk.release_mark);
    }
    if (last_chunk(chunk.request)) {
        requester.data_responses_pending -= returns_data(work.opcode) ? 1 : 0;
        if (FaultSites* const sites = fault_sites(work.opcode); sites != nullptr) {
            if (const auto fault = injected_fault(&sites->landed)) {
                requester.error = static_cast<ibv_wc_status>(*fault);
                return;
            }
        }
        requester.finished.push_back(std::move(work));
        requester.started.pop_front();
    }
}

ibv_wc_status QueuePair::check_local_access(const SendWork& work) {
    if (work.length_bytes > max_message_bytes) {
        return IBV_WC_LOC_LEN_ERR;
    }
    const unsigned required_access = returns_data(work.opcode) ? IBV_ACCESS_LOCAL_WRITE : 0;
    for (const ibv_sge& sge : work.sges) {
        if (sge.length > 0 && local_region(sge, required_access) == nullptr) {
            return IBV_WC_LOC_PROT_ERR;
        }
    }
    return IBV_WC_SUCCESS;
}

// Copy between the application's memory and the chunk's place in the payload ring.
ibv_wc_status QueuePair::copy_payload(const SendWork& work, const wire::Request& request, bool to_memory) {
    BounceBuffer* const bounce = &link_->memory();
    if (work.is_inline) {
        std::copy_n(work.data.begin() + static_cast<std::ptrdiff_t>(request.chunk_offset_bytes), request.chunk_bytes,
                    bounce->at(request.payload_offset));
        return IBV_WC_SUCCESS;
    }
    const bool moved = for_each_sge_in_chunk(work, request, [&](const ibv_sge& part, std::size_t at) {
        const unsigned required_access = to_memory ? IBV_ACCESS_LOCAL_WRITE : 0;
        Region* const region = local_region(part, required_access);
        return region != nullptr &&
               (to_memory
                    ? region->write(part.addr, *bounce, request.payload_offset + at, part.length)
                    : region->read(part.addr, bounce, request.payload_offset + at, part.length)) == RegionError::none;
    });
    return moved ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR;
}

} // namespace gdrkit::twin::verbs
