// The functions of the requester thread that run without the queue pair's lock. They start send requests in order,
// submit the chunks of the requests while there is space in the rings, and handle the responses, which arrive in the
// same order.
#include <algorithm>
#include <cstring>

#include "ibverbs/chunk_sges.hpp"
#include "ibverbs/window.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Publish the submitted chunks when they have this number of bytes. The peer can then start with these chunks while
// this thread prepares the next chunks.
constexpr std::uint64_t publish_after_bytes = 64U << 10;

// Time that each min_rnr_timer code stands for, in microseconds.
constexpr std::uint32_t rnr_time_us[32] = {
    655360, 10,   20,   30,   40,    60,    80,    120,   160,   240,   320,   480,    640,    960,    1280,   1920,
    2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

bool returns_data(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

wire::Opcode get_wire_opcode(ibv_wr_opcode opcode) {
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

wire::Request make_first_chunk(const SendWork& work) {
    wire::Request request{};
    request.magic = wire::magic;
    request.opcode = get_wire_opcode(work.opcode);
    if (work.opcode == IBV_WR_SEND_WITH_IMM || work.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        request.flags |= wire::flag_immediate;
    }
    if (work.opcode == IBV_WR_SEND_WITH_INV) {
        request.flags |= wire::flag_invalidate;
    }
    if (work.is_solicited) {
        request.flags |= wire::flag_solicited;
    }
    request.remote_address = work.remote_address;
    request.message_bytes = work.length_bytes;
    request.rkey = work.rkey;
    request.immediate_data = work.immediate_data;
    request.compare_or_add = work.compare_or_add;
    request.swap = work.swap;
    request.srq_number = work.remote_srq_number;
    return request;
}

ibv_wc_status get_completion_status(wire::Status response_status) {
    switch (response_status) {
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

    FaultSites(std::string_view before_name, std::string_view landed_name) : before(before_name), landed(landed_name) {}
};

// Return the two fault points of requests with this opcode; nullptr if they have none.
FaultSites* find_fault_sites(ibv_wr_opcode opcode) {
    if (changes_keys(opcode)) {
        return nullptr;
    }
    static FaultSites send("wc.send", "wc.send.landed"), write("wc.rdma_write", "wc.rdma_write.landed"),
        read("wc.rdma_read", "wc.rdma_read.landed");
    switch (get_wire_opcode(opcode)) {
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

// Count a request, and return the status that the fault plan injects. A rule with nic= applies if it names the NIC of
// the requester, or the NIC of the responder if the responder is on this machine.
std::optional<int> find_request_fault(FaultSite* site, const Device& requester, const ibv_qp_attr& attr) {
    if (!site->has_rule()) {
        return find_injected_fault(site);
    }
    // The second name is replaced if the responder is on this machine.
    std::array<std::string_view, 2> nic_names = {requester.public_device.name, requester.public_device.name};
    for (unsigned index = 0; index < device_count(); ++index) {
        if (std::memcmp(&device_at(index).gid, &attr.ah_attr.grh.dgid, sizeof(ibv_gid)) == 0) {
            nic_names[1] = device_at(index).public_device.name;
        }
    }
    return find_injected_fault(site, nic_names);
}

// Return whether the chunk consumes a receive request of the peer. The peer refuses such a chunk as not ready if it has
// no receive request.
bool needs_receive(const wire::Request& request) {
    return request.opcode == wire::Opcode::send ? request.chunk_offset_bytes == 0
                                                : (request.flags & wire::flag_immediate) != 0 && is_last_chunk(request);
}

} // namespace

bool ConnectedQueuePair::has_fault_rule(ibv_wr_opcode opcode) {
    const FaultSites* const sites = find_fault_sites(opcode);
    return sites != nullptr && (sites->before.has_rule() || sites->landed.has_rule());
}

// Count a request at its fault point. The caller has checked that the fault plan has no rule for it.
void ConnectedQueuePair::count_without_fault(ibv_wr_opcode opcode) {
    if (FaultSites* const sites = find_fault_sites(opcode); sites != nullptr) {
        find_injected_fault(&sites->before);
    }
}

std::optional<int> ConnectedQueuePair::find_fault_of_landed_request(ibv_wr_opcode opcode, const ibv_qp_attr& attr) {
    FaultSites* const sites = find_fault_sites(opcode);
    return sites == nullptr ? std::nullopt : find_request_fault(&sites->landed, *context_->device, attr);
}

// Submit chunks and handle responses. Return whether there was progress.
bool ConnectedQueuePair::make_progress(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    requester.copied_bytes = 0;
    const bool has_submission_progress = submit_requests(attr);
    const bool has_handled_response = handle_responses(attr);
    if (!requester.first_send_error && requester.chunks_in_flight.empty() && requester.local_error) {
        requester.first_send_error = requester.local_error;
    }
    const bool is_connection_lost =
        !requester.first_send_error && requester.is_peer_gone && link_->response_count() == requester.handled_count;
    if (is_connection_lost) {
        lose_connection();
    }
    return has_submission_progress || has_handled_response || is_connection_lost || requester.first_send_error;
}

// Start requests and submit their chunks until one of them must wait or fails. Return whether there was progress.
bool ConnectedQueuePair::submit_requests(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    bool has_progress = false;
    while (!requester.local_error && !requester.first_send_error && !requester.is_peer_gone &&
           (requester.has_pending_chunk || !requester.queued_sends.empty())) {
        // Stop if the peer may refuse the last chunk as not ready, if many bytes were copied directly (their
        // completions are delivered first), or until the time of the next retry.
        if ((requester.may_get_rnr && !requester.chunks_in_flight.empty()) ||
            requester.copied_bytes >= publish_after_bytes ||
            (requester.retry_at && Clock::now() < *requester.retry_at)) {
            break;
        }
        requester.may_get_rnr = false;
        requester.retry_at.reset();
        if ((!requester.has_pending_chunk && !start_next_send(attr)) ||
            (requester.has_pending_chunk && !submit_chunk())) {
            break;
        }
        has_progress = true;
    }
    if (requester.submitted_count != requester.published_count) {
        publish();
    }
    return has_progress;
}

// Start the next queued request. Return false if it must wait for earlier ones.
bool ConnectedQueuePair::start_next_send(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    FaultSites* const sites = find_fault_sites(requester.queued_sends.front().opcode);
    FaultSite* const site = sites != nullptr ? &sites->before : nullptr;
    if (must_wait_for_earlier_sends(requester.queued_sends.front(), site)) {
        return false;
    }
    const SendWork& work = requester.started_sends.push_back(std::move(requester.queued_sends.front()));
    requester.queued_sends.pop_front();
    if (changes_keys(work.opcode)) {
        change_keys(work);
        return true;
    }
    const std::optional<int> fault = site != nullptr ? find_request_fault(site, *context_->device, attr) : std::nullopt;
    if (fault == IBV_WC_SUCCESS) {
        // The request completes with success, and moves no bytes.
        requester.finished_sends.push_back(std::move(requester.started_sends.back()));
        requester.started_sends.pop_back();
        return true;
    }
    ibv_wc_status status = fault ? static_cast<ibv_wc_status>(*fault) : prepare_send(work, attr);
    if (status == IBV_WC_SUCCESS) {
        status = connect_to_peer(attr);
        if (status == IBV_WC_RETRY_EXC_ERR && !is_reliable()) {
            // The message is lost, which its sender does not notice.
            requester.finished_sends.push_back(std::move(requester.started_sends.back()));
            requester.started_sends.pop_back();
            return true;
        }
    }
    if (status != IBV_WC_SUCCESS) {
        requester.local_error = status;
        return true;
    }
    if (copy_directly(work, attr)) {
        return true;
    }
    requester.has_pending_chunk = true;
    requester.next_chunk = make_first_chunk(work);
    requester.rnr_retries_left = attr.rnr_retry;
    requester.pending_data_response_count += returns_data(work.opcode) ? 1 : 0;
    return true;
}

// Bind or invalidate a memory window for the only started request. The status codes are the same as in
// rxe_do_local_ops.
void ConnectedQueuePair::change_keys(const SendWork& work) {
    RequesterState& requester = requester_state_;
    const bool is_bind = work.opcode == IBV_WR_BIND_MW;
    const bool has_succeeded = is_bind ? bind_window(*work.binding, domain_, qp_num_)
                                       : invalidate_window(work.immediate_data, domain_, qp_num_);
    if (!has_succeeded) {
        requester.local_error = is_bind ? IBV_WC_MW_BIND_ERR : IBV_WC_LOC_QP_OP_ERR;
        return;
    }
    requester.finished_sends.push_back(std::move(requester.started_sends.front()));
    requester.started_sends.pop_front();
}

// Return whether the next request must wait for earlier requests. A fenced request waits for reads and atomic requests.
// A request that changes keys, or has a rule in the fault plan, waits for all earlier requests, so that it does not
// affect them.
bool ConnectedQueuePair::must_wait_for_earlier_sends(const SendWork& next_send, FaultSite* site) {
    RequesterState& requester = requester_state_;
    if ((next_send.is_fenced && requester.pending_data_response_count > 0) ||
        (changes_keys(next_send.opcode) && !requester.started_sends.empty()) || must_drain_for_copy(next_send)) {
        return true;
    }
    if (site == nullptr || !site->has_rule()) {
        return false;
    }
    Lock lock(mutex_);
    return !requester.started_sends.empty() || !requester.finished_sends.empty() || !delayed_completions_.empty();
}

// Check a request. Return the status with which it fails, or IBV_WC_SUCCESS.
ibv_wc_status ConnectedQueuePair::prepare_send(const SendWork& work, const ibv_qp_attr& attr) {
    if (returns_data(work.opcode) && attr.max_rd_atomic == 0) {
        return IBV_WC_LOC_QP_OP_ERR;
    }
    return check_local_access(work);
}

// Reserve pipe pages or payload space for the next chunk. Return false if there is no space at present.
bool ConnectedQueuePair::reserve_payload(const SendWork& work, wire::Request* request, std::uint32_t* page_count) {
    *page_count = count_pages_to_splice(work, *request);
    if (*page_count > 0) {
        request->flags |= wire::flag_piped;
        request->payload_offset = 0;
        return requester_state_.pipe_pages_used + *page_count <= link_->max_pipe_pages();
    }
    request->flags &= static_cast<std::uint16_t>(~wire::flag_piped);
    const auto payload_offset = link_->reserve(request->chunk_bytes);
    request->payload_offset = payload_offset.value_or(0);
    return payload_offset.has_value();
}

// Submit the next chunk. Return false if there is no space at present.
bool ConnectedQueuePair::submit_chunk() {
    RequesterState& requester = requester_state_;
    const SendWork& work = requester.started_sends.back();
    wire::Request& request = requester.next_chunk;
    const std::uint64_t remaining_bytes = work.length_bytes - request.chunk_offset_bytes;
    request.chunk_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(remaining_bytes, max_chunk_bytes));
    std::uint32_t page_count = 0;
    if (requester.chunks_in_flight.size() == Link::slot_count || !reserve_payload(work, &request, &page_count)) {
        return false;
    }
    const bool is_splice_queued = page_count > 0 && can_queue_splice(work, request);
    if (is_splice_queued) {
        queue_splice(work);
    } else {
        flush_splices();
        if (requester.local_error) {
            return true;
        }
    }
    if (wire::carries_payload(request.opcode)) {
        const ibv_wc_status status = is_splice_queued ? IBV_WC_SUCCESS
                                     : page_count > 0 ? splice_payload(work, request)
                                                      : copy_payload(work, request, /*to_memory=*/false);
        if (status != IBV_WC_SUCCESS) {
            // The chunk is not published. No further chunk is submitted while local_error is set.
            requester.local_error = status;
            return true;
        }
    }
    requester.pipe_pages_used += page_count;
    if (requester.chunks_in_flight.empty()) {
        requester.last_response_at = Clock::now();
    }
    requester.chunks_in_flight.push_back({request, link_->reserved_bytes(), page_count});
    link_->put_request(requester.submitted_count++, request);
    requester.may_get_rnr = is_reliable() && needs_receive(request);
    requester.unpublished_bytes += request.chunk_bytes;
    request.chunk_offset_bytes += request.chunk_bytes;
    requester.has_pending_chunk = request.chunk_offset_bytes < work.length_bytes;
    if (requester.unpublished_bytes >= publish_after_bytes) {
        publish();
    }
    return true;
}

void ConnectedQueuePair::publish() {
    RequesterState& requester = requester_state_;
    flush_splices();
    requester.published_count = requester.submitted_count;
    requester.unpublished_bytes = 0;
    requester.is_peer_gone |= !link_->publish_requests(requester.published_count, peer_socket_.get());
}

bool ConnectedQueuePair::handle_responses(const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    bool has_handled_response = false;
    while (!requester.first_send_error && !requester.chunks_in_flight.empty() &&
           link_->response_count() != requester.handled_count) {
        has_handled_response = true;
        const wire::Response response = link_->read_response(requester.handled_count);
        if (link_->response_count() - requester.handled_count > requester.chunks_in_flight.size() ||
            !wire::is_well_formed(response, requester.chunks_in_flight.front().request)) {
            lose_connection();
        } else {
            handle_response(response, attr);
        }
    }
    if (has_handled_response) {
        requester.last_response_at = Clock::now();
    }
    return has_handled_response;
}

void ConnectedQueuePair::handle_response(const wire::Response& response, const ibv_qp_attr& attr) {
    RequesterState& requester = requester_state_;
    const InFlightChunk chunk = requester.chunks_in_flight.front();
    requester.chunks_in_flight.pop_front();
    ++requester.handled_count;
    requester.pipe_pages_used -= chunk.pipe_pages;
    if (response.status == wire::Status::receiver_not_ready) {
        // No chunk was submitted after the refused one (see may_get_rnr), so the refused chunk is submitted again next.
        requester.next_chunk = chunk.request;
        requester.has_pending_chunk = true;
        link_->release_up_to(chunk.release_mark);
        // The retry count 7 means unlimited retries.
        if (attr.rnr_retry != 7 && requester.rnr_retries_left-- == 0) {
            requester.first_send_error = IBV_WC_RNR_RETRY_EXC_ERR;
        } else {
            requester.retry_at = Clock::now() + std::chrono::microseconds(rnr_time_us[response.rnr_timer]);
        }
        return;
    }
    if (response.status != wire::Status::done) {
        requester.first_send_error = get_completion_status(response.status);
        return;
    }
    SendWork& work = requester.started_sends.front();
    if (returns_data(work.opcode)) {
        // The old value of an atomic request is in the response, not in the payload ring.
        if (chunk.request.opcode != wire::Opcode::read) {
            std::memcpy(link_->memory().data_at(chunk.request.payload_offset), &response.original_value,
                        sizeof response.original_value);
        }
        if (const ibv_wc_status status = copy_payload(work, chunk.request, /*to_memory=*/true);
            status != IBV_WC_SUCCESS) {
            requester.first_send_error = status;
            return;
        }
    }
    if (chunk.pipe_pages == 0) {
        link_->release_up_to(chunk.release_mark);
    }
    if (is_last_chunk(chunk.request)) {
        requester.pending_data_response_count -= returns_data(work.opcode) ? 1 : 0;
        finish_first_started(attr);
    }
}

// Check that the local regions permit the request. Return the status with which it fails, or IBV_WC_SUCCESS.
ibv_wc_status ConnectedQueuePair::check_local_access(const SendWork& work) {
    if (work.length_bytes > max_message_bytes) {
        return IBV_WC_LOC_LEN_ERR;
    }
    const unsigned required_access = returns_data(work.opcode) ? IBV_ACCESS_LOCAL_WRITE : 0;
    for (const ibv_sge& sge : work.sges) {
        if (sge.length > 0 && find_local_region(sge, required_access) == nullptr) {
            return IBV_WC_LOC_PROT_ERR;
        }
    }
    return IBV_WC_SUCCESS;
}

// Copy the payload of a chunk from the application's memory to the payload ring, or back if `to_memory` is true.
ibv_wc_status ConnectedQueuePair::copy_payload(const SendWork& work, const wire::Request& request, bool to_memory) {
    BounceBuffer* const bounce = &link_->memory();
    if (work.is_inline) {
        std::copy_n(work.inline_data.begin() + static_cast<std::ptrdiff_t>(request.chunk_offset_bytes),
                    request.chunk_bytes, bounce->data_at(request.payload_offset));
        return IBV_WC_SUCCESS;
    }
    const bool all_copied = for_each_sge_in_chunk(work, request, [&](const ibv_sge& sge, std::size_t offset) {
        const unsigned required_access = to_memory ? IBV_ACCESS_LOCAL_WRITE : 0;
        Region* const region = find_local_region(sge, required_access);
        if (region == nullptr) {
            return false;
        }
        const std::size_t bounce_offset = request.payload_offset + offset;
        const RegionError error = to_memory ? region->write(sge.addr, *bounce, bounce_offset, sge.length)
                                            : region->read(sge.addr, bounce, bounce_offset, sge.length);
        return error == RegionError::none;
    });
    return all_copied ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR;
}

} // namespace gdrkit::twin::verbs
