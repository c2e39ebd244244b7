// What the files of the requester share.
#pragma once

#include <algorithm>

#include "ibverbs/queue_pair.hpp"

namespace gdrkit::twin::verbs {

// Calls `visit` with each piece of the application's memory that holds a part of this part of the message, and with how
// much of it lies before the piece, until one says false.
template <typename Visit> bool for_each_part(const SendWork& work, const wire::Request& request, Visit visit) {
    std::uint64_t skip = request.chunk_offset_bytes;
    std::size_t before = 0;
    for (const ibv_sge& piece : work.pieces) {
        if (skip >= piece.length) {
            skip -= piece.length;
            continue;
        }
        const std::size_t size = std::min<std::size_t>(piece.length - skip, request.chunk_bytes - before);
        if (size == 0) {
            break;
        }
        if (!visit(ibv_sge{piece.addr + skip, static_cast<std::uint32_t>(size), piece.lkey}, before)) {
            return false;
        }
        before += size;
        skip = 0;
    }
    return true;
}

} // namespace gdrkit::twin::verbs
