// cudaMemcpy* and cudaMemset*, in both forms (forms.hpp).
#include "cudart/forms.hpp"

namespace gdrkit::twin::cudart {
namespace {

// As in the real runtime, a copy of nothing succeeds, whatever its direction.
Error copy(void* to, const void* from, std::size_t length_bytes, int kind) {
    if (length_bytes == 0) {
        return success;
    }
    switch (kind) {
    case host_to_host:
    case inferred:
        return call(&Driver::cuMemcpy, address_of(to), address_of(from), length_bytes);
    case host_to_device:
        return call(&Driver::cuMemcpyHtoD_v2, address_of(to), from, length_bytes);
    case device_to_host:
        return call(&Driver::cuMemcpyDtoH_v2, to, address_of(from), length_bytes);
    case device_to_device:
        return call(&Driver::cuMemcpyDtoD_v2, address_of(to), address_of(from), length_bytes);
    default:
        return invalid_memcpy_direction;
    }
}

Error copy_in_stream(void* to, const void* from, std::size_t length_bytes, int kind, Handle stream) {
    if (length_bytes == 0) {
        return success;
    }
    switch (kind) {
    case host_to_host:
    case inferred:
        return call(&Driver::cuMemcpyAsync, address_of(to), address_of(from), length_bytes, stream);
    case host_to_device:
        return call(&Driver::cuMemcpyHtoDAsync_v2, address_of(to), from, length_bytes, stream);
    case device_to_host:
        return call(&Driver::cuMemcpyDtoHAsync_v2, to, address_of(from), length_bytes, stream);
    case device_to_device:
        return call(&Driver::cuMemcpyDtoDAsync_v2, address_of(to), address_of(from), length_bytes, stream);
    default:
        return invalid_memcpy_direction;
    }
}

bool is_valid_kind(int kind) {
    return kind >= host_to_host && kind <= inferred;
}

// The memory that one side of a copy must be in. The driver finds out itself what inferred memory is.
std::uint32_t source_of(int kind) {
    return kind == inferred                                     ? cuda::memory_unified
           : kind == device_to_host || kind == device_to_device ? cuda::memory_device
                                                                : cuda::memory_host;
}

std::uint32_t destination_of(int kind) {
    return kind == inferred                                     ? cuda::memory_unified
           : kind == host_to_device || kind == device_to_device ? cuda::memory_device
                                                                : cuda::memory_host;
}

cuda::Copy2d copy_of_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                          std::size_t width_bytes, std::size_t height, int kind) {
    return {{0, 0, source_of(kind), from, address_of(from), nullptr, from_pitch},
            {0, 0, destination_of(kind), to, address_of(to), nullptr, to_pitch},
            width_bytes,
            height};
}

// Run a copy of rows after a check of its arguments. Empty copies succeed.
template <typename Body>
Error check_rows(std::size_t to_pitch, std::size_t from_pitch, std::size_t width_bytes, std::size_t height, int kind,
                 Body&& body) {
    if (width_bytes == 0 || height == 0) {
        return success;
    }
    if (!is_valid_kind(kind)) {
        return invalid_memcpy_direction;
    }
    if (width_bytes > to_pitch || width_bytes > from_pitch) {
        return invalid_pitch_value;
    }
    return body();
}

cuda::CopySide3d side_of(const Position& position, const PitchedPointer& memory, std::uint32_t memory_type) {
    return {position.x, position.y,   position.z,   0, memory_type, memory.pointer, address_of(memory.pointer), nullptr,
            0,          memory.pitch, memory.y_size};
}

// Convert a three-dimensional copy, and check it. Arrays are not supported.
Error convert(const Copy3d* copy, cuda::Copy3d* converted) {
    if (copy == nullptr) {
        return invalid_value;
    }
    if (copy->from_array != nullptr || copy->to_array != nullptr) {
        return not_supported;
    }
    if (!is_valid_kind(copy->kind)) {
        return invalid_memcpy_direction;
    }
    *converted = {side_of(copy->from_position, copy->from, source_of(copy->kind)),
                  side_of(copy->to_position, copy->to, destination_of(copy->kind)), copy->extent.width,
                  copy->extent.height, copy->extent.depth};
    return success;
}

// The memory of both devices has one address space, so a copy between devices needs no further parameters.
Error convert(const PeerCopy3d* copy, cuda::Copy3d* converted) {
    if (copy == nullptr) {
        return invalid_value;
    }
    if (const Error error = check_device(copy->from_device); error != success) {
        return error;
    }
    if (const Error error = check_device(copy->to_device); error != success) {
        return error;
    }
    const Copy3d plain{copy->from_array, copy->from_position, copy->from, copy->to_array, copy->to_position,
                       copy->to,         copy->extent,        inferred};
    return convert(&plain, converted);
}

template <typename Copy> Error copy_volume(const Copy* copy) {
    cuda::Copy3d converted{};
    const Error error = convert(copy, &converted);
    if (error != success || converted.width_bytes == 0 || converted.height == 0 || converted.depth == 0) {
        return error;
    }
    const cuda::Copy3d* const parameters = &converted;
    return is_per_thread ? finish(call(&Driver::cuMemcpy3DAsync_v2, parameters, per_thread_stream))
                         : call(&Driver::cuMemcpy3D_v2, parameters);
}

template <typename Copy> Error copy_volume_in_stream(const Copy* copy, Handle stream) {
    cuda::Copy3d converted{};
    const Error error = convert(copy, &converted);
    if (error != success || converted.width_bytes == 0 || converted.height == 0 || converted.depth == 0) {
        return error;
    }
    const cuda::Copy3d* const parameters = &converted;
    return call(&Driver::cuMemcpy3DAsync_v2, parameters, stream);
}

unsigned char byte_of(int value) {
    return static_cast<unsigned char>(value);
}

// Fill a volume, one slice after the other.
Error fill_volume(const PitchedPointer& memory, int value, const Extent& extent, Handle stream) {
    if (extent.width > memory.pitch) {
        return invalid_pitch_value;
    }
    if (extent.width == 0 || extent.height == 0) {
        return success;
    }
    for (std::size_t slice = 0; slice < extent.depth; ++slice) {
        const Address to = address_of(memory.pointer) + slice * memory.y_size * memory.pitch;
        if (const Error error =
                call(&Driver::cuMemsetD2D8Async, to, memory.pitch, byte_of(value), extent.width, extent.height, stream);
            error != success) {
            return error;
        }
    }
    return success;
}

} // namespace

GDRKIT_SYNC_FORM(cudaMemcpy)(void* to, const void* from, std::size_t length_bytes, int kind) {
    return entry_in_context([&] {
        return is_per_thread ? finish(copy_in_stream(to, from, length_bytes, kind, per_thread_stream))
                             : copy(to, from, length_bytes, kind);
    });
}

GDRKIT_STREAM_FORM(cudaMemcpyAsync)(void* to, const void* from, std::size_t length_bytes, int kind, Handle stream) {
    return entry_in_context([&] { return copy_in_stream(to, from, length_bytes, kind, resolved(stream)); });
}

GDRKIT_SYNC_FORM(cudaMemcpy2D)
(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width_bytes, std::size_t height,
 int kind) {
    return entry_in_context([&] {
        return check_rows(to_pitch, from_pitch, width_bytes, height, kind, [&] {
            const cuda::Copy2d copy = copy_of_rows(to, to_pitch, from, from_pitch, width_bytes, height, kind);
            return is_per_thread ? finish(call(&Driver::cuMemcpy2DAsync_v2, &copy, per_thread_stream))
                                 : call(&Driver::cuMemcpy2DUnaligned_v2, &copy);
        });
    });
}

GDRKIT_STREAM_FORM(cudaMemcpy2DAsync)
(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width_bytes, std::size_t height,
 int kind, Handle stream) {
    return entry_in_context([&] {
        return check_rows(to_pitch, from_pitch, width_bytes, height, kind, [&] {
            const cuda::Copy2d copy = copy_of_rows(to, to_pitch, from, from_pitch, width_bytes, height, kind);
            return call(&Driver::cuMemcpy2DAsync_v2, &copy, resolved(stream));
        });
    });
}

GDRKIT_SYNC_FORM(cudaMemcpy3D)(const Copy3d* copy) {
    return entry_in_context([&] { return copy_volume(copy); });
}

GDRKIT_STREAM_FORM(cudaMemcpy3DAsync)(const Copy3d* copy, Handle stream) {
    return entry_in_context([&] { return copy_volume_in_stream(copy, resolved(stream)); });
}

GDRKIT_SYNC_FORM(cudaMemcpy3DPeer)(const PeerCopy3d* copy) {
    return entry_in_context([&] { return copy_volume(copy); });
}

GDRKIT_STREAM_FORM(cudaMemcpy3DPeerAsync)(const PeerCopy3d* copy, Handle stream) {
    return entry_in_context([&] { return copy_volume_in_stream(copy, resolved(stream)); });
}

GDRKIT_SYNC_FORM(cudaMemset)(void* to, int value, std::size_t length_bytes) {
    return entry_in_context([&] {
        return is_per_thread ? finish(call(&Driver::cuMemsetD8Async, address_of(to), byte_of(value), length_bytes,
                                           per_thread_stream))
                             : call(&Driver::cuMemsetD8_v2, address_of(to), byte_of(value), length_bytes);
    });
}

GDRKIT_STREAM_FORM(cudaMemsetAsync)(void* to, int value, std::size_t length_bytes, Handle stream) {
    return entry_in_context(
        [&] { return call(&Driver::cuMemsetD8Async, address_of(to), byte_of(value), length_bytes, resolved(stream)); });
}

GDRKIT_SYNC_FORM(cudaMemset2D)(void* to, std::size_t pitch, int value, std::size_t width_bytes, std::size_t height) {
    return entry_in_context([&] {
        return is_per_thread
                   ? finish(call(&Driver::cuMemsetD2D8Async, address_of(to), pitch, byte_of(value), width_bytes, height,
                                 per_thread_stream))
                   : call(&Driver::cuMemsetD2D8_v2, address_of(to), pitch, byte_of(value), width_bytes, height);
    });
}

GDRKIT_STREAM_FORM(cudaMemset2DAsync)
(void* to, std::size_t pitch, int value, std::size_t width_bytes, std::size_t height, Handle stream) {
    return entry_in_context([&] {
        return call(&Driver::cuMemsetD2D8Async, address_of(to), pitch, byte_of(value), width_bytes, height,
                    resolved(stream));
    });
}

GDRKIT_SYNC_FORM(cudaMemset3D)(PitchedPointer memory, int value, Extent extent) {
    return entry_in_context([&] {
        const Error error = fill_volume(memory, value, extent, resolved(0));
        return is_per_thread ? finish(error) : error;
    });
}

GDRKIT_STREAM_FORM(cudaMemset3DAsync)(PitchedPointer memory, int value, Extent extent, Handle stream) {
    return entry_in_context([&] { return fill_volume(memory, value, extent, resolved(stream)); });
}

#if GDRKIT_CUDART_MAJOR == 12
GDRKIT_STREAM_FORM(cudaMemcpyBatchAsync)
(const Address* to, const Address* from, const std::size_t* lengths_bytes, std::size_t count, const void* attributes,
 const std::size_t* attribute_indices, std::size_t attribute_count, std::size_t* failed_index, Handle stream) {
#else
GDRKIT_STREAM_FORM(cudaMemcpyBatchAsync)
(const Address* to, const Address* from, const std::size_t* lengths_bytes, std::size_t count, const void* attributes,
 const std::size_t* attribute_indices, std::size_t attribute_count, Handle stream) {
    std::size_t ignored_index = 0;
    std::size_t* const failed_index = &ignored_index;
#endif
    return entry_in_context([&] {
        return call(&Driver::cuMemcpyBatchAsync, to, from, lengths_bytes, count, attributes, attribute_indices,
                    attribute_count, failed_index, resolved(stream));
    });
}

} // namespace gdrkit::twin::cudart
