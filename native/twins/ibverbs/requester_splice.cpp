// The requester splices large payloads of writes into the pipe of the connection (pipe.hpp) instead of copying them.
// One call splices the payloads of consecutive small writes from one region.
#include "ibverbs/chunk_sges.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Payloads of fewer bytes are copied.
constexpr std::size_t min_splice_bytes = 4096;

} // namespace

// Return the local region of a scatter-gather entry if it permits the access; else nullptr. The pointer is valid until
// the next call. The last region is cached, because most requests use the same region again. A cached region cannot be
// confused with a later one, because a key is reused only after all 2^32 keys were used.
Region* ConnectedQueuePair::find_local_region(const ibv_sge& sge, unsigned required_access) {
    std::shared_ptr<Region>& cached = requester_state_.cached_region;
    if (cached == nullptr || cached->lkey != sge.lkey || cached->is_revoked() ||
        !is_same_protection_domain(cached->domain, domain_) || !cached->permits(required_access) ||
        !cached->covers(sge.addr, sge.length)) {
        cached = find_by_lkey(sge.lkey, domain_, required_access, sge.addr, sge.length);
    }
    return cached.get();
}

// Return the number of pipe pages that this chunk needs, or 0 if the chunk shall be copied. Small chunks are copied.
// Chunks that may be sent again after a receiver-not-ready response, and chunks that the peer may drop, are copied too,
// because their spliced pages would stay in the pipe.
std::uint32_t ConnectedQueuePair::count_pages_to_splice(const SendWork& work, const wire::Request& request) {
    if (!is_reliable() || request.opcode != wire::Opcode::write || (request.flags & wire::flag_immediate) != 0 ||
        work.is_inline || request.chunk_bytes < min_splice_bytes) {
        return 0;
    }
    std::uint32_t page_count = 0;
    const bool all_mapped = for_each_sge_in_chunk(work, request, [&](const ibv_sge& sge, std::size_t) {
        page_count += Pipe::count_pages(sge.addr, sge.length);
        Region* const region = find_local_region(sge, 0);
        return region != nullptr && region->is_mapped();
    });
    return all_mapped && page_count <= link_->max_pipe_pages() ? page_count : 0;
}

ibv_wc_status ConnectedQueuePair::splice_payload(const SendWork& work, const wire::Request& request) {
    const bool all_spliced = for_each_sge_in_chunk(work, request, [&](const ibv_sge& sge, std::size_t) {
        Region* const region = find_local_region(sge, 0);
        return region != nullptr && region->splice_to_pipe(sge.addr, &link_->pipe(), sge.length) == RegionError::none;
    });
    return all_spliced ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR;
}

// Add the payload of this request to pending_splices. flush_splices() splices it into the pipe.
void ConnectedQueuePair::queue_splice(const SendWork& work) {
    const ibv_sge& sge = work.sges.front();
    requester_state_.splice_region = requester_state_.cached_region;
    requester_state_.pending_splices.push_back({reinterpret_cast<void*>(sge.addr), sge.length});
}

// Return whether the payload of this chunk may be queued to be spliced later. The chunk must be a complete request with
// one scatter-gather entry, in the same region as the payloads that are already queued. The caller has called
// count_pages_to_splice for this chunk, which sets cached_region.
bool ConnectedQueuePair::can_queue_splice(const SendWork& work, const wire::Request& request) const {
    const RequesterState& requester = requester_state_;
    return work.sges.size() == 1 && request.chunk_bytes == work.length_bytes &&
           (requester.pending_splices.empty() || requester.splice_region == requester.cached_region);
}

// Splice all queued payloads. If one cannot be spliced, its request fails with a local error, and the requests after it
// go back to queued_sends as if they had not started.
void ConnectedQueuePair::flush_splices() {
    RequesterState& requester = requester_state_;
    if (requester.pending_splices.empty()) {
        return;
    }
    std::size_t succeeded_count = 0;
    const std::size_t splice_count = requester.pending_splices.size();
    const RegionError error =
        requester.splice_region->splice_to_pipe(requester.pending_splices, &link_->pipe(), &succeeded_count);
    requester.pending_splices.clear();
    requester.splice_region.reset();
    if (error == RegionError::none) {
        return;
    }
    // The requests after the failed one go back to queued_sends. The last started request goes back too if its payload
    // is not in pending_splices, because it has a chunk that is not submitted, or a local error.
    std::size_t requeued_count = splice_count - succeeded_count - 1;
    if (requester.has_pending_chunk || requester.local_error) {
        requester.has_pending_chunk = false;
        ++requeued_count;
    }
    for (; requeued_count > 0; --requeued_count) {
        requester.queued_sends.push_front(std::move(requester.started_sends.back()));
        requester.started_sends.pop_back();
    }
    for (std::size_t removed_count = splice_count - succeeded_count; removed_count > 0; --removed_count) {
        requester.pipe_pages_used -= requester.chunks_in_flight.back().pipe_pages;
        requester.chunks_in_flight.pop_back();
        --requester.submitted_count;
    }
    requester.local_error = IBV_WC_LOC_PROT_ERR;
}

} // namespace gdrkit::twin::verbs
