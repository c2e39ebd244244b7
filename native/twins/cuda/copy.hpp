// What copies of one call and copies of many have in common.
#pragma once

#include <cstdint>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

enum class Side { any, device_only };

struct CopyRequest {
    std::uint64_t to = 0, from = 0;
    std::uint64_t length_bytes = 0;
    Side to_side = Side::any, from_side = Side::any;
};

// A copy in its turn of a stream. Of pageable memory it has taken the bytes when this returns, or put them there.
Result copy_later(const ContextRef& context, const CopyRequest& request, Handle stream_handle);

} // namespace gdrkit::twin::cuda
