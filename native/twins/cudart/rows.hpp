// Converts the descriptions of 2D and 3D copies from the structures of the runtime to the structures of the driver.
#pragma once

#include "cuda/array_abi.hpp"
#include "cudart/driver.hpp"

namespace gdrkit::twin::cudart {

inline bool is_valid_copy_kind(int kind) {
    return kind >= host_to_host && kind <= memcpy_default;
}

// Return the CUmemorytype of the source or the destination of a copy of this kind (CopyKind). For `memcpy_default`, the
// driver determines the type from the address.
inline std::uint32_t get_source_memory_type(int kind) {
    return kind == memcpy_default                               ? cuda::memory_unified
           : kind == device_to_host || kind == device_to_device ? cuda::memory_device
                                                                : cuda::memory_host;
}

inline std::uint32_t get_destination_memory_type(int kind) {
    return kind == memcpy_default                               ? cuda::memory_unified
           : kind == host_to_device || kind == device_to_device ? cuda::memory_device
                                                                : cuda::memory_host;
}

inline cuda::CopySide3d make_copy_side(const Position& position, const PitchedPointer& memory,
                                       std::uint32_t memory_type) {
    return {position.x, position.y,   position.z,   0, memory_type, memory.pointer, to_address(memory.pointer), nullptr,
            0,          memory.pitch, memory.y_size};
}

// Store the sizes of an element and of a row of an array, in bytes.
inline Error get_element_and_row_bytes(Handle array, std::size_t* element_bytes, std::size_t* row_bytes) {
    cuda::ArrayDescription description{};
    const Error error = call(&Driver::cuArray3DGetDescriptor_v2, &description, array);
    const std::int32_t format = description.format;
    const bool is_narrow = format == cuda::format_unsigned_8 || format == cuda::format_signed_8;
    const bool is_wide =
        format == cuda::format_unsigned_32 || format == cuda::format_signed_32 || format == cuda::format_float;
    *element_bytes = description.channels * (is_narrow ? 1 : is_wide ? 4 : 2);
    *row_bytes = description.width * *element_bytes;
    return error;
}

inline Error get_row_bytes(Handle array, std::size_t* row_bytes) {
    std::size_t element_bytes = 0;
    return get_element_and_row_bytes(array, &element_bytes, row_bytes);
}

// Describe an array as one side of a copy, and store the size of its elements. `position.x` counts elements.
inline Error describe_array_side(const void* array, const Position& position, cuda::CopySide3d* side,
                                 std::size_t* element_bytes) {
    std::size_t row_bytes = 0;
    const Error error = get_element_and_row_bytes(to_address(array), element_bytes, &row_bytes);
    *side = {};
    side->x_bytes = position.x * *element_bytes;
    side->y = position.y;
    side->z = position.z;
    side->memory_type = cuda::memory_array;
    side->array = const_cast<void*>(array);
    return error;
}

// Check the description of a 3D copy and convert it for the driver. The width of copy->extent counts elements if one
// side is an array, else bytes.
inline Error convert_copy(const Copy3d* copy, cuda::Copy3d* converted) {
    if (copy == nullptr) {
        return invalid_value;
    }
    if (!is_valid_copy_kind(copy->kind)) {
        return invalid_memcpy_direction;
    }
    *converted = {make_copy_side(copy->from_position, copy->from, get_source_memory_type(copy->kind)),
                  make_copy_side(copy->to_position, copy->to, get_destination_memory_type(copy->kind)),
                  copy->extent.width, copy->extent.height, copy->extent.depth};
    std::size_t element_bytes = 1;
    Error error = success;
    if (copy->from_array != nullptr) {
        error = describe_array_side(copy->from_array, copy->from_position, &converted->from, &element_bytes);
    }
    if (error == success && copy->to_array != nullptr) {
        error = describe_array_side(copy->to_array, copy->to_position, &converted->to, &element_bytes);
    }
    converted->width_bytes = copy->extent.width * element_bytes;
    return error;
}

} // namespace gdrkit::twin::cudart
