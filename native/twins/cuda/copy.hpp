// Copies of single ranges (copy.cpp), of rows (copy_rows.cpp) and in batches (copy_batch.cpp).
#pragma once

#include <cstdint>
#include <functional>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"
#include "cuda/operand.hpp"

namespace gdrkit::twin::cuda {

// A copy. Both layouts have the same width, height and depth.
struct CopyRequest {
    Layout to, from;
    AllowedMemory to_memory = AllowedMemory::any, from_memory = AllowedMemory::any;
};

// Return the request for a copy of one contiguous range.
CopyRequest make_contiguous_copy(std::uint64_t to, std::uint64_t from, std::uint64_t length_bytes,
                                 AllowedMemory to_memory = AllowedMemory::any,
                                 AllowedMemory from_memory = AllowedMemory::any);

// Carry out a synchronous copy in the legacy default stream. As with the real driver, the call does not wait for a copy
// within device memory, unless SYNC_MEMOPS is set for the memory or the context.
Result copy_synchronous(const ContextRef& context, const CopyRequest& request);

// Carry out a copy between two contexts, after all earlier work and before all later work of both contexts and of
// the current context. The call waits for the copy in the same cases as copy_synchronous().
Result copy_peer(const ContextRef& context, const CopyRequest& request, Handle to_context, Handle from_context);

// Queue a copy in a stream. Pageable memory is host memory that is neither allocated by CUDA nor registered. When this
// function returns, a pageable source has been read, and a pageable destination has been written.
Result enqueue_copy(const ContextRef& context, const CopyRequest& request, Handle stream_handle);

// Convert the description of a copy that the program passes to cuMemcpy3D to a request. Fail with invalid_value if the
// description is invalid.
Result make_copy_request(const Copy3d* copy, CopyRequest* request);

// Check a copy and store the function that carries it out, or an empty function for an empty copy.
Result prepare_copy(const ContextRef& context, const CopyRequest& request, std::function<void()>* work);

// Queue a copy between two contexts. Fail with invalid_context if one of them does not exist. The copy itself does not
// use the contexts.
Result enqueue_copy_peer(const ContextRef& context, const CopyRequest& request, Handle to_context, Handle from_context,
                         Handle stream_handle);

} // namespace gdrkit::twin::cuda
