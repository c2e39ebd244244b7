// The asynchronous copy that single copies (copy.cpp) and batches (copy_batch.cpp) share.
#pragma once

#include <cstdint>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

enum class OperandSide { any, device_only };

struct CopyRequest {
    std::uint64_t to = 0, from = 0;
    std::uint64_t length_bytes = 0;
    OperandSide to_side = OperandSide::any, from_side = OperandSide::any;
};

// Queue a copy in a stream. If the source is pageable its bytes have been read when this returns; if the destination is
// pageable they have been written.
Result enqueue_copy(const ContextRef& context, const CopyRequest& request, Handle stream_handle);

} // namespace gdrkit::twin::cuda
