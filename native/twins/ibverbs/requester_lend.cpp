// How the requester of a queue pair lends pages to the pipe: of writes that come together by one call.
#include "ibverbs/requester_parts.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::size_t lent_bytes_least = 4096;

} // namespace

// The region that a piece of a request names, if it may be used so; else nullptr. It is good until the next call.
// Requests name the same region again and again, and keys never come back.
Region* QueuePair::own_region(const ibv_sge& piece, unsigned wanted) {
    std::shared_ptr<Region>& known = sending_work_.known;
    if (known == nullptr || known->lkey != piece.lkey || known->revoked() || known->domain != domain_ ||
        !known->permits(wanted) || !known->covers(piece.addr, piece.length)) {
        known = find_local(piece.lkey, domain_, wanted, piece.addr, piece.length);
    }
    return known.get();
}

// How many pages of the pipe this part of a request needs; 0: it does not go that way. A message that may find no
// receive is looked at again and does not, nor what is as easily copied.
std::uint32_t QueuePair::pages_to_lend(const SendWork& work, const wire::Request& request) {
    if (request.opcode != wire::Opcode::write || (request.flags & wire::flag_immediate) != 0 || work.is_inline ||
        request.chunk_bytes < lent_bytes_least) {
        return 0;
    }
    std::uint32_t pages = 0;
    const bool all = for_each_part(work, request, [&](const ibv_sge& part, std::size_t) {
        pages += Pipe::pages_of(part.addr, part.length);
        Region* const region = own_region(part, 0);
        return region != nullptr && region->mapped();
    });
    return all && pages <= link_->pipe().pages_most() ? pages : 0;
}

ibv_wc_status QueuePair::lend_local(const SendWork& work, const wire::Request& request) {
    const bool lent = for_each_part(work, request, [&](const ibv_sge& part, std::size_t) {
        Region* const region = own_region(part, 0);
        return region != nullptr && region->lend(part.addr, &link_->pipe(), part.length) == RegionError::none;
    });
    return lent ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR;
}

// What this request lends goes into the pipe when it is published.
void QueuePair::lend_later(const SendWork& work) {
    const ibv_sge& piece = work.pieces.front();
    sending_work_.lender = sending_work_.known;
    sending_work_.to_lend.push_back({reinterpret_cast<void*>(piece.addr), piece.length});
}

// Whether what this part lends may wait for that of others: of whole requests, one behind the other, out of one region.
// pages_to_lend has looked at the request.
bool QueuePair::may_lend_later(const SendWork& work, const wire::Request& request) const {
    const Sending& own = sending_work_;
    return work.pieces.size() == 1 && request.chunk_bytes == work.length_bytes &&
           (own.to_lend.empty() || own.lender == own.known);
}

// Where one of several cannot be lent, it is the one that failed here: those after it did not begin.
void QueuePair::lend_now() {
    Sending& own = sending_work_;
    if (own.to_lend.empty()) {
        return;
    }
    std::size_t whole = 0;
    const std::size_t count = own.to_lend.size();
    const RegionError error = own.lender->lend(own.to_lend, &link_->pipe(), &whole);
    own.to_lend.clear();
    own.lender.reset();
    if (error == RegionError::none) {
        return;
    }
    // The last that was begun is one of them, or the next one, of which nothing was submitted.
    std::size_t back = count - whole - 1;
    if (own.open || own.stopped) {
        own.open = false;
        ++back;
    }
    for (; back > 0; --back) {
        own.taken.push_front(std::move(own.begun.back()));
        own.begun.pop_back();
    }
    for (std::size_t left = count - whole; left > 0; --left) {
        own.pages_lent -= own.chunks.back().pages;
        own.chunks.pop_back();
        --own.submitted;
    }
    own.stopped = IBV_WC_LOC_PROT_ERR;
}

} // namespace gdrkit::twin::verbs
