// Tensor maps: descriptions of tensors for copies that kernels start. The driver computes them on the host. The twin
// checks the requirements that the documentation of CUDA 13.0 states, and keeps the parameters in a layout of its own.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>

#include "cuda/entry.hpp"

namespace gdrkit::twin::cuda {
namespace {

// CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
enum ElementType : int {
    element_uint8 = 0,
    element_float16 = 6,
    element_tfloat32_ftz = 12,
    element_16u4_align8 = 13,
    element_16u4_align16 = 14,
    element_16u6_align16 = 15,
};
enum Interleave : int { interleave_none = 0, interleave_16_bytes = 1, interleave_32_bytes = 2 };
enum Swizzle : int {
    swizzle_none = 0,
    swizzle_32_bytes = 1,
    swizzle_64_bytes = 2,
    swizzle_128_bytes = 3,
    swizzle_128_atom_32 = 4,
    swizzle_128_atom_32_flip_8 = 5,
    swizzle_128_atom_64 = 6,
};
constexpr int promotion_last = 3; // CU_TENSOR_MAP_L2_PROMOTION_L2_256B
constexpr int fill_none = 0, fill_nan = 1;

constexpr std::uint32_t rank_max = 5;
constexpr std::uint32_t map_magic = 0x70616d74; // the bytes "tmap"
constexpr std::uint64_t extent_max = std::uint64_t{1} << 32, stride_limit_bytes = std::uint64_t{1} << 40;

// The parameters that cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col have in common.
struct Tensor {
    int element_type;
    std::uint32_t rank;
    std::uint64_t address;
    const std::uint64_t* extents;
    const std::uint64_t* strides_bytes; // of all dimensions except the first
    const std::uint32_t* element_strides;
    int interleave, swizzle, promotion, fill; // enumerators of the types above

    // Return whether the elements are packed in groups of 16.
    [[nodiscard]] bool is_packed_16() const {
        return element_type == element_16u4_align16 || element_type == element_16u6_align16;
    }
    [[nodiscard]] std::uint64_t alignment_bytes() const {
        return interleave == interleave_32_bytes || is_packed_16() ? 32 : 16;
    }
};

// The content of a CUtensorMap.
struct TensorMap {
    std::uint64_t address;
    std::uint32_t magic;
    std::uint16_t alignment_bytes;
    std::uint8_t type, rank;
    std::array<std::uint64_t, rank_max - 1> strides_bytes;
    std::array<std::uint32_t, rank_max> extents_minus_1;
    std::array<std::uint16_t, rank_max> box;              // of a tiled map
    std::array<std::int16_t, 2 * (rank_max - 2)> corners; // of an im2col map: lower offsets, then upper offsets
    std::uint16_t channel_count, pixel_count;             // of an im2col map, for one copy
    std::array<std::uint8_t, rank_max> element_strides;
    std::uint8_t interleave, swizzle, promotion, fill;
};
static_assert(sizeof(TensorMap) <= 128);

// Return the size of an element in bits. The table is in the order of CUtensorMapDataType.
std::uint64_t get_element_bits(int element_type) {
    constexpr std::uint8_t bits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
    return bits[element_type];
}

bool is_between(int value, int first, int last) {
    return value >= first && value <= last;
}

bool is_valid_swizzle(const Tensor& tensor) {
    switch (tensor.element_type) {
    case element_16u6_align16:
        return tensor.interleave == interleave_none &&
               (tensor.swizzle == swizzle_none || tensor.swizzle == swizzle_128_bytes ||
                tensor.swizzle == swizzle_128_atom_32 || tensor.swizzle == swizzle_128_atom_64);
    case element_16u4_align16:
        return tensor.swizzle == swizzle_none || tensor.swizzle == swizzle_128_bytes ||
               tensor.swizzle == swizzle_128_atom_32;
    default:
        return tensor.interleave != interleave_32_bytes || tensor.swizzle == swizzle_32_bytes;
    }
}

bool are_valid_enumerators(const Tensor& tensor) {
    return is_between(tensor.element_type, element_uint8, element_16u6_align16) &&
           is_between(tensor.interleave, interleave_none, interleave_32_bytes) &&
           is_between(tensor.swizzle, swizzle_none, swizzle_128_atom_64) &&
           is_between(tensor.promotion, 0, promotion_last) && is_between(tensor.fill, fill_none, fill_nan) &&
           // Only elements of a floating-point type can be filled with NaN.
           (tensor.fill == fill_none || is_between(tensor.element_type, element_float16, element_tfloat32_ftz));
}

bool are_valid_dimensions(const Tensor& tensor) {
    const std::span extents(tensor.extents, tensor.rank);
    if (!std::ranges::all_of(extents, [](std::uint64_t extent) { return extent != 0 && extent <= extent_max; }) ||
        (tensor.is_packed_16() && extents[0] % 128 != 0) ||
        (tensor.element_type == element_16u4_align8 && extents[0] % 2 != 0)) {
        return false;
    }
    const std::span strides(tensor.strides_bytes, tensor.rank - 1);
    const std::span element_strides(tensor.element_strides, tensor.rank);
    // Without interleaving, CUDA ignores the element stride of the first dimension.
    const auto checked_strides = element_strides.subspan(tensor.interleave == interleave_none ? 1 : 0);
    return std::ranges::all_of(strides,
                               [&](std::uint64_t stride) {
                                   return stride % tensor.alignment_bytes() == 0 && stride < stride_limit_bytes;
                               }) &&
           std::ranges::all_of(checked_strides, [](std::uint32_t stride) { return stride != 0 && stride <= 8; });
}

// Return whether the inner dimension of the box, which has `inner_count` elements, fits into the pattern of the
// swizzle.
bool fits_swizzle(const Tensor& tensor, std::uint64_t inner_count) {
    constexpr std::uint64_t pattern_bytes[] = {0, 32, 64, 128, 128, 128, 128}; // index: Swizzle
    return tensor.interleave != interleave_none || tensor.swizzle == swizzle_none ||
           inner_count * get_element_bits(tensor.element_type) / 8 <= pattern_bytes[tensor.swizzle];
}

// Return whether the arguments meet the requirements that both encode functions have. `map` is the CUtensorMap of the
// caller, which must be aligned to 64 bytes.
bool meets_common_requirements(const void* map, const Tensor& tensor, std::uint32_t rank_min) {
    return map != nullptr && reinterpret_cast<std::uintptr_t>(map) % 64 == 0 && tensor.extents != nullptr &&
           tensor.element_strides != nullptr && are_valid_enumerators(tensor) && tensor.rank >= rank_min &&
           tensor.rank <= rank_max && (tensor.interleave == interleave_none || tensor.rank >= 3) &&
           (tensor.strides_bytes != nullptr || tensor.rank == 1) && tensor.address % tensor.alignment_bytes() == 0 &&
           is_valid_swizzle(tensor) && are_valid_dimensions(tensor);
}

TensorMap make_tensor_map(const Tensor& tensor) {
    TensorMap map{};
    map.address = tensor.address;
    map.magic = map_magic;
    map.alignment_bytes = static_cast<std::uint16_t>(tensor.alignment_bytes());
    map.type = static_cast<std::uint8_t>(tensor.element_type);
    map.rank = static_cast<std::uint8_t>(tensor.rank);
    for (std::uint32_t index = 0; index < tensor.rank; ++index) {
        map.extents_minus_1[index] = static_cast<std::uint32_t>(tensor.extents[index] - 1);
        map.element_strides[index] = static_cast<std::uint8_t>(tensor.element_strides[index]);
    }
    std::copy_n(tensor.strides_bytes, tensor.rank - 1, map.strides_bytes.begin());
    map.interleave = static_cast<std::uint8_t>(tensor.interleave);
    map.swizzle = static_cast<std::uint8_t>(tensor.swizzle);
    map.promotion = static_cast<std::uint8_t>(tensor.promotion);
    map.fill = static_cast<std::uint8_t>(tensor.fill);
    return map;
}

Result encode_tiled(void* map, const Tensor& tensor, const std::uint32_t* box) {
    if (box == nullptr || !meets_common_requirements(map, tensor, 1)) {
        return invalid_value;
    }
    const std::span sides(box, tensor.rank);
    if (!std::ranges::all_of(sides, [](std::uint32_t side) { return side != 0 && side <= 256; }) ||
        // Without interleaving, the inner dimension of the box must be a multiple of 16 bytes.
        (tensor.interleave == interleave_none && box[0] * get_element_bits(tensor.element_type) % 128 != 0) ||
        (tensor.is_packed_16() && box[0] != 128) || !fits_swizzle(tensor, box[0])) {
        return invalid_value;
    }
    TensorMap content = make_tensor_map(tensor);
    std::ranges::transform(sides, content.box.begin(), [](std::uint32_t side) { return std::uint16_t(side); });
    std::memcpy(map, &content, sizeof content);
    return success;
}

// The part of a tensor that an im2col map covers: the offsets of its lower and upper corner from the corners of the
// tensor, for each spatial dimension, and the numbers of channels and pixels of one copy.
struct PixelBox {
    const int* lower_offsets;
    const int* upper_offsets;
    std::uint32_t channel_count, pixel_count;
};

Result encode_im2col(void* map, const Tensor& tensor, const PixelBox& box) {
    if (box.lower_offsets == nullptr || box.upper_offsets == nullptr || !meets_common_requirements(map, tensor, 3)) {
        return invalid_value;
    }
    if (box.channel_count == 0 || box.channel_count > 256 || (tensor.is_packed_16() && box.channel_count != 128) ||
        box.pixel_count == 0 || box.pixel_count > 1024 || !fits_swizzle(tensor, box.channel_count)) {
        return invalid_value;
    }
    // The limit of the corner offsets depends on the number of spatial dimensions; the index is this number - 1.
    constexpr int corner_limits[] = {32768, 128, 16};
    TensorMap content = make_tensor_map(tensor);
    const std::uint32_t spatial_count = tensor.rank - 2;
    for (std::uint32_t index = 0; index < spatial_count; ++index) {
        const int corner_limit = corner_limits[spatial_count - 1], lower = box.lower_offsets[index],
                  upper = box.upper_offsets[index];
        // Dimension 0 of the tensor is the dimension of the channels.
        const std::int64_t side = static_cast<std::int64_t>(tensor.extents[index + 1]) + upper - lower;
        if (!is_between(lower, -corner_limit, corner_limit - 1) ||
            !is_between(upper, -corner_limit, corner_limit - 1) || side <= 0) {
            return invalid_value;
        }
        content.corners[index] = static_cast<std::int16_t>(lower);
        content.corners[rank_max - 2 + index] = static_cast<std::int16_t>(upper);
    }
    content.channel_count = static_cast<std::uint16_t>(box.channel_count);
    content.pixel_count = static_cast<std::uint16_t>(box.pixel_count);
    std::memcpy(map, &content, sizeof content);
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuTensorMapEncodeTiled(void* map, int type, std::uint32_t rank, void* address,
                                                const std::uint64_t* extents, const std::uint64_t* strides_bytes,
                                                const std::uint32_t* box, const std::uint32_t* element_strides,
                                                int interleave, int swizzle, int promotion, int fill) {
    return run_entry_in_context("cuTensorMapEncodeTiled", [&](const ContextRef&) {
        return encode_tiled(map,
                            {type, rank, reinterpret_cast<std::uint64_t>(address), extents, strides_bytes,
                             element_strides, interleave, swizzle, promotion, fill},
                            box);
    });
}

GDRKIT_CUDA_ENTRY Result cuTensorMapEncodeIm2col(void* map, int type, std::uint32_t rank, void* address,
                                                 const std::uint64_t* extents, const std::uint64_t* strides_bytes,
                                                 const int* lower, const int* upper, std::uint32_t channel_count,
                                                 std::uint32_t pixel_count, const std::uint32_t* element_strides,
                                                 int interleave, int swizzle, int promotion, int fill) {
    return run_entry_in_context("cuTensorMapEncodeIm2col", [&](const ContextRef&) {
        return encode_im2col(map,
                             {type, rank, reinterpret_cast<std::uint64_t>(address), extents, strides_bytes,
                              element_strides, interleave, swizzle, promotion, fill},
                             {lower, upper, channel_count, pixel_count});
    });
}

GDRKIT_CUDA_ENTRY Result cuTensorMapReplaceAddress(void* map, void* address) {
    return run_entry_in_context("cuTensorMapReplaceAddress", [&](const ContextRef&) {
        TensorMap content{};
        if (map == nullptr) {
            return invalid_value;
        }
        std::memcpy(&content, map, sizeof content);
        const auto new_address = reinterpret_cast<std::uint64_t>(address);
        if (content.magic != map_magic || new_address % content.alignment_bytes != 0) {
            return invalid_value;
        }
        content.address = new_address;
        std::memcpy(map, &content, sizeof content);
        return success;
    });
}

} // namespace gdrkit::twin::cuda
