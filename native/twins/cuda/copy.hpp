// Queues one asynchronous copy in a stream. Used by single copies (copy.cpp) and by batches of copies (copy_batch.cpp).
#pragma once

#include <cstdint>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// The memory that one address of a copy may refer to.
enum class AllowedMemory { any, device_only };

struct CopyRequest {
    std::uint64_t to = 0, from = 0; // addresses
    std::uint64_t length_bytes = 0;
    AllowedMemory to_memory = AllowedMemory::any, from_memory = AllowedMemory::any;
};

// Queue a copy in a stream. Pageable memory is host memory that is neither allocated by CUDA nor registered. When this
// function returns, a pageable source has been read, and a pageable destination has been written.
Result enqueue_copy(const ContextRef& context, const CopyRequest& request, Handle stream_handle);

} // namespace gdrkit::twin::cuda
