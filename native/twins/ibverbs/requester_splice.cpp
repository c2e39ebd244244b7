// How the requester splices write payloads into the pipe instead of copying them. Payloads of consecutive small writes
// from one region are spliced by one call.
#include "ibverbs/chunk_sges.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::size_t min_splice_bytes = 4096;

} // namespace

// Return the local region that a scatter-gather entry names, if it permits the access; else nullptr. The pointer is
// valid until the next call. The last region is cached because requests name the same region again and again, and keys
// are never reused.
Region* QueuePair::local_region(const ibv_sge& sge, unsigned required_access) {
    std::shared_ptr<Region>& cached = requester_state_.cached_region;
    if (cached == nullptr || cached->lkey != sge.lkey || cached->revoked() || cached->domain != domain_ ||
        !cached->permits(required_access) || !cached->covers(sge.addr, sge.length)) {
        cached = find_by_lkey(sge.lkey, domain_, required_access, sge.addr, sge.length);
    }
    return cached.get();
}

// Return the number of pipe pages that this chunk needs; 0 if it shall be copied. Copied are small chunks and those
// that may be sent again after receiver-not-ready.
std::uint32_t QueuePair::pages_to_splice(const SendWork& work, const wire::Request& request) {
    if (request.opcode != wire::Opcode::write || (request.flags & wire::flag_immediate) != 0 || work.is_inline ||
        request.chunk_bytes < min_splice_bytes) {
        return 0;
    }
    std::uint32_t pages = 0;
    const bool all_mapped = for_each_sge_in_chunk(work, request, [&](const ibv_sge& part, std::size_t) {
        pages += Pipe::pages_of(part.addr, part.length);
        Region* const region = local_region(part, 0);
        return region != nullptr && region->mapped();
    });
    return all_mapped && pages <= link_->pipe().max_pages() ? pages : 0;
}

ibv_wc_status QueuePair::splice_payload(const SendWork& work, const wire::Request& request) {
    const bool spliced = for_each_sge_in_chunk(work, request, [&](const ibv_sge& part, std::size_t) {
        Region* const region = local_region(part, 0);
        return region != nullptr && region->splice_to(part.addr, &link_->pipe(), part.length) == RegionError::none;
    });
    return spliced ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR;
}

// Queue the payload of this request; publish() splices it.
void QueuePair::queue_splice(const SendWork& work) {
    const ibv_sge& sge = work.sges.front();
    requester_state_.splice_region = requester_state_.cached_region;
    requester_state_.pending_splices.push_back({reinterpret_cast<void*>(sge.addr), sge.length});
}

// Return whether this chunk's payload may be queued: whole requests with one entry, consecutive, from one region.
// pages_to_splice has checked the request.
bool QueuePair::can_queue_splice(const SendWork& work, const wire::Request& request) const {
    const RequesterState& requester = requester_state_;
    return work.sges.size() == 1 && request.chunk_bytes == work.length_bytes &&
           (requester.pending_splices.empty() || requester.splice_region == requester.cached_region);
}

// Splice all queued payloads. If one fails, its request gets the local error, and the requests after it go back to the
// queue as if they had not started.
void QueuePair::flush_splices() {
    RequesterState& requester = requester_state_;
    if (requester.pending_splices.empty()) {
        return;
    }
    std::size_t succeeded = 0;
    const std::size_t count = requester.pending_splices.size();
    const RegionError error = requester.splice_region->splice_to(requester.pending_splices, &link_->pipe(), &succeeded);
    requester.pending_splices.clear();
    requester.splice_region.reset();
    if (error == RegionError::none) {
        return;
    }
    // The last started request is one of the queued ones, or the next one, of which nothing was submitted.
    std::size_t requeued_count = count - succeeded - 1;
    if (requester.chunk_pending || requester.local_error) {
        requester.chunk_pending = false;
        ++requeued_count;
    }
    for (; requeued_count > 0; --requeued_count) {
        requester.queued.push_front(std::move(requester.started.back()));
        requester.started.pop_back();
    }
    for (std::size_t removed_count = count - succeeded; removed_count > 0; --removed_count) {
        requester.pipe_pages_used -= requester.in_flight.back().pipe_pages;
        requester.in_flight.pop_back();
        --requester.submitted;
    }
    requester.local_error = IBV_WC_LOC_PROT_ERR;
}

} // namespace gdrkit::twin::verbs
