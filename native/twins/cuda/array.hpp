// Arrays and mipmapped arrays, as memory. An array has its elements in rows without gaps, in device memory whose
// address the program does not get.
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
    std::uint64_t element_bytes = 0, row_bytes = 0, rows = 1, slices = 1;
};
using ArrayRef = std::shared_ptr<Array>;

// Find an array, or a level of a mipmapped array; null if none has this handle.
ArrayRef find_array(Handle handle);

// Destroy the arrays of a context that ends.
void destroy_arrays_of(Handle context);

} // namespace gdrkit::twin::cuda
