// Iterates over the scatter-gather entries of one chunk of a send request. The files requester_*.cpp use it.
#pragma once

#include <algorithm>

#include "ibverbs/connected_queue_pair.hpp"

namespace gdrkit::twin::verbs {

// Call visit(sge, offset) for each range of the application's memory that belongs to the chunk `request`.
// `offset` is the position of the range in the chunk. Stop and return false when `visit` returns false.
template <typename Visit> bool for_each_sge_in_chunk(const SendWork& work, const wire::Request& request, Visit visit) {
    std::uint64_t skip_bytes = request.chunk_offset_bytes;
    std::size_t offset = 0;
    for (const ibv_sge& sge : work.sges) {
        if (skip_bytes >= sge.length) {
            skip_bytes -= sge.length;
            continue;
        }
        const std::size_t size_bytes = std::min<std::size_t>(sge.length - skip_bytes, request.chunk_bytes - offset);
        if (size_bytes == 0) {
            break;
        }
        if (!visit(ibv_sge{sge.addr + skip_bytes, static_cast<std::uint32_t>(size_bytes), sge.lkey}, offset)) {
            return false;
        }
        offset += size_bytes;
        skip_bytes = 0;
    }
    return true;
}

} // namespace gdrkit::twin::verbs
