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
    Handle context = 0;
    RangeRef range;
    std::uint64_t element_bytes = 0, row_bytes = 0, row_count = 1, slice_count = 1;
};
using ArrayRef = std::shared_ptr<Array>;

// Return the array, or the level of a mipmapped array, that has this handle, or null.
ArrayRef find_array(Handle handle);
bool mipmap_exists(Handle handle);

// Return the size of an element with this CUarray_format and number of channels, or 0 if no array has such elements.
std::uint64_t count_element_bytes(int format, std::uint32_t channels);

// Destroy the arrays of a context that ends.
void destroy_context_arrays(Handle context);

} // namespace gdrkit::twin::cuda
