// Declarations of CUDA arrays and mipmapped arrays. The twin keeps the elements of an array row after row, without
// gaps, in device memory. The program does not get the address of this memory.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/array_abi.hpp"
#include "cuda/memory.hpp"

namespace gdrkit::twin::cuda {

struct Array {
    ArrayDescription description{};
    Handle context = 0; // the context to which the array belongs (Context::owning_context_handle)
    RangeRef range;     // the device memory of the elements
    std::uint64_t element_bytes = 0, row_bytes = 0, row_count = 1, slice_count = 1;
};
using ArrayRef = std::shared_ptr<Array>;

// Return the array with this handle, which may be a level of a mipmapped array; null if the handle is unknown.
ArrayRef find_array(Handle handle);
bool mipmap_exists(Handle handle);

// Return the number of bytes of an element with this CUarray_format and number of channels, or 0 if arrays cannot have
// such elements.
std::uint64_t count_element_bytes(int format, std::uint32_t channels);

// Destroy the arrays of a context that ends.
void destroy_context_arrays(Handle context);

} // namespace gdrkit::twin::cuda
