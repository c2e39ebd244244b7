// The part of the CUDA driver's binary interface that concerns arrays, written from the public documentation of
// CUDA 13.0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdrkit::twin::cuda {

// CUarray_format
enum ArrayFormat : std::int32_t {
    format_unsigned_8 = 0x01,
    format_unsigned_16 = 0x02,
    format_unsigned_32 = 0x03,
    format_signed_8 = 0x08,
    format_signed_16 = 0x09,
    format_signed_32 = 0x0a,
    format_half = 0x10,
    format_float = 0x20,
};

// CUDA_ARRAY3D_*
enum ArrayFlags : std::uint32_t {
    array_layered = 1,
    array_surface = 2,
    array_cubemap = 4,
    array_gather = 8,
    array_flags_mask = 0x1ff // all flags
};

struct PlaneDescription {      // CUDA_ARRAY_DESCRIPTOR
    std::size_t width, height; // in elements
    std::int32_t format;
    std::uint32_t channels; // number of channels of an element
};
static_assert(sizeof(PlaneDescription) == 24);

struct ArrayDescription {             // CUDA_ARRAY3D_DESCRIPTOR
    std::size_t width, height, depth; // in elements; the depth of a layered array is its number of layers
    std::int32_t format;
    std::uint32_t channels; // number of channels of an element
    std::uint32_t flags;
};
static_assert(sizeof(ArrayDescription) == 40 && offsetof(ArrayDescription, flags) == 32);

} // namespace gdrkit::twin::cuda
