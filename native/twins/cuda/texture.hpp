// Textures and surfaces: their part of the CUDA driver's binary interface, written from the public documentation of
// CUDA 13.0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// CUresourcetype
enum TextureResource : std::int32_t {
    resource_array = 0,
    resource_mipmap = 1,
    resource_linear = 2,
    resource_pitch = 3
};
inline constexpr std::uint32_t texture_normalized_coordinates = 2; // CU_TRSF_NORMALIZED_COORDINATES

struct LinearResource {
    DevicePointer address;
    std::int32_t format;
    std::uint32_t channels;
    std::size_t length_bytes;
};

struct RowsResource {
    DevicePointer address;
    std::int32_t format;
    std::uint32_t channels;
    std::size_t width; // in elements
    std::size_t height;
    std::size_t pitch_bytes;
};

struct ResourceDescription { // CUDA_RESOURCE_DESC
    std::int32_t type;
    union {
        Handle array; // handle of an array or a mipmapped array
        LinearResource linear;
        RowsResource rows;
        std::uint64_t words[16];
    };
    std::uint32_t flags;
};
static_assert(sizeof(ResourceDescription) == 144 && offsetof(ResourceDescription, flags) == 136);

struct TextureDescription { // CUDA_TEXTURE_DESC
    std::int32_t address_modes[3];
    std::int32_t filter_mode;
    std::uint32_t flags, anisotropy_max;
    std::int32_t mipmap_filter_mode;
    float level_bias, level_min, level_max;
    float border[4];
    std::int32_t reserved[12];
};
static_assert(sizeof(TextureDescription) == 104 && offsetof(TextureDescription, border) == 40);

struct ViewDescription { // CUDA_RESOURCE_VIEW_DESC
    std::int32_t format;
    std::size_t width, height, depth;
    std::uint32_t first_level, last_level, first_layer, last_layer;
    std::uint32_t reserved[16];
};
static_assert(sizeof(ViewDescription) == 112);

// Destroy the textures and surfaces of a context that ends.
void destroy_context_textures(Handle context);

} // namespace gdrkit::twin::cuda
