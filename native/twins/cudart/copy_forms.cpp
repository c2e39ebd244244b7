// cudaMemcpy* and cudaMemset*, in the ordinary form and the per-thread form (forms.hpp).
#include "cudart/forms.hpp"
#include "cudart/rows.hpp"

namespace gdrkit::twin::cudart {
namespace {

// As in the real runtime, a copy of 0 bytes succeeds, even if its direction (`kind`) is invalid.
Error copy(void* to, const void* from, std::size_t length_bytes, int kind) {
    if (length_bytes == 0) {
        return success;
    }
    switch (kind) {
    case host_to_host:
    case memcpy_default:
        return call(&Driver::cuMemcpy, to_address(to), to_address(from), length_bytes);
    case host_to_device:
        return call(&Driver::cuMemcpyHtoD_v2, to_address(to), from, length_bytes);
    case device_to_host:
        return call(&Driver::cuMemcpyDtoH_v2, to, to_address(from), length_bytes);
    case device_to_device:
        return call(&Driver::cuMemcpyDtoD_v2, to_address(to), to_address(from), length_bytes);
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
    case memcpy_default:
        return call(&Driver::cuMemcpyAsync, to_address(to), to_address(from), length_bytes, stream);
    case host_to_device:
        return call(&Driver::cuMemcpyHtoDAsync_v2, to_address(to), from, length_bytes, stream);
    case device_to_host:
        return call(&Driver::cuMemcpyDtoHAsync_v2, to, to_address(from), length_bytes, stream);
    case device_to_device:
        return call(&Driver::cuMemcpyDtoDAsync_v2, to_address(to), to_address(from), length_bytes, stream);
    default:
        return invalid_memcpy_direction;
    }
}

cuda::Copy2d make_rows_copy(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                            std::size_t width_bytes, std::size_t height, int kind) {
    return {{0, 0, get_source_memory_type(kind), from, to_address(from), nullptr, from_pitch},
            {0, 0, get_destination_memory_type(kind), to, to_address(to), nullptr, to_pitch},
            width_bytes,
            height};
}

// Run a copy of rows after a check of its arguments. Empty copies succeed.
template <typename Body>
Error check_and_copy_rows(std::size_t to_pitch, std::size_t from_pitch, std::size_t width_bytes, std::size_t height,
                          int kind, Body&& body) {
    if (width_bytes == 0 || height == 0) {
        return success;
    }
    if (!is_valid_copy_kind(kind)) {
        return invalid_memcpy_direction;
    }
    if (width_bytes > to_pitch || width_bytes > from_pitch) {
        return invalid_pitch_value;
    }
    return body();
}

// Convert the description of a copy between devices for the driver. The driver orders the copy with the work of the
// primary contexts of both devices.
Error convert_copy(const PeerCopy3d* copy, cuda::Copy3d* converted) {
    if (copy == nullptr) {
        return invalid_value;
    }
    const Copy3d copy_without_devices{copy->from_array, copy->from_position, copy->from,
                                      copy->to_array,   copy->to_position,   copy->to,
                                      copy->extent,     memcpy_default};
    Error error = check_device(copy->from_device);
    if (error == success) {
        error = check_device(copy->to_device);
    }
    if (error == success) {
        error = convert_copy(&copy_without_devices, converted);
    }
    if (error == success) {
        error = get_primary_context(copy->from_device, &converted->from.context);
    }
    if (error == success) {
        error = get_primary_context(copy->to_device, &converted->to.context);
    }
    return error;
}

// Convert the description of a copy for the driver, and run the copy by `run`, a call of the driver. Empty copies
// succeed.
template <typename Copy, typename Run> Error convert_and_run(const Copy* copy, Run&& run) {
    cuda::Copy3d converted{};
    const Error error = convert_copy(copy, &converted);
    if (error != success || converted.width_bytes == 0 || converted.height == 0 || converted.depth == 0) {
        return error;
    }
    return run(static_cast<const cuda::Copy3d*>(&converted));
}

unsigned char to_byte(int value) {
    return static_cast<unsigned char>(value);
}

// A volume to fill with `fill_byte`. `pitch_bytes` is the distance from a row to the next row, and `slice_bytes` the
// distance from a slice to the next slice. The width of the extent is in bytes.
struct Volume {
    Address address;
    std::size_t pitch_bytes, slice_bytes;
    Extent extent;
    unsigned char fill_byte;
};

// Check that all bytes of a volume are allocated. The driver checks each slice more strictly when it fills the slice.
Error check_allocated(const Volume& volume) {
    Address end = 0, rows_bytes = 0, slices_bytes = 0;
    if (__builtin_mul_overflow(volume.extent.height - 1, volume.pitch_bytes, &rows_bytes) ||
        __builtin_mul_overflow(volume.extent.depth - 1, volume.slice_bytes, &slices_bytes) ||
        __builtin_add_overflow(volume.address, volume.extent.width, &end) ||
        __builtin_add_overflow(end, rows_bytes, &end) || __builtin_add_overflow(end, slices_bytes, &end)) {
        return invalid_value;
    }
    // The volume may span several ranges, because a program may map memory at adjacent addresses.
    for (Address next_address = volume.address; next_address < end;) {
        Address base = 0;
        std::size_t length_bytes = 0;
        if (call(&Driver::cuMemGetAddressRange_v2, &base, &length_bytes, next_address) != success) {
            return invalid_value;
        }
        next_address = base + length_bytes;
    }
    return success;
}

// Fill a volume by `fill_rows`, a call of the driver, after a check of the whole volume.
template <typename FillRows>
Error fill_volume(const PitchedPointer& memory, int value, const Extent& extent, FillRows&& fill_rows) {
    if (extent.width > memory.pitch) {
        return invalid_pitch_value;
    }
    if (extent.width == 0 || extent.height == 0 || extent.depth == 0) {
        return success;
    }
    Volume volume{to_address(memory.pointer), memory.pitch, 0, extent, to_byte(value)};
    // The number of rows of an allocated slice (y_size) matters only if there are several slices.
    if (extent.depth > 1 &&
        (extent.height > memory.y_size || __builtin_mul_overflow(memory.y_size, memory.pitch, &volume.slice_bytes))) {
        return invalid_value;
    }
    if (extent.height == memory.y_size || extent.depth == 1) {
        // The rows of all slices follow each other at the distance `pitch_bytes`, so the driver checks and fills them
        // in one call.
        return __builtin_mul_overflow(extent.height, extent.depth, &volume.extent.height) ? invalid_value
                                                                                          : fill_rows(volume);
    }
    Error error = check_allocated(volume);
    for (std::size_t slice = 0; error == success && slice < extent.depth; ++slice) {
        error = fill_rows(volume);
        volume.address += volume.slice_bytes;
    }
    return error;
}

Error fill_volume_in_stream(const PitchedPointer& memory, int value, const Extent& extent, Handle stream) {
    return fill_volume(memory, value, extent, [&](const Volume& rows) {
        return call(&Driver::cuMemsetD2D8Async, rows.address, rows.pitch_bytes, rows.fill_byte, rows.extent.width,
                    rows.extent.height, stream);
    });
}

// Call the driver's synchronous function. In contrast to the function for streams, it returns only when memory of the
// host is filled.
Error fill_volume_synchronously(const PitchedPointer& memory, int value, const Extent& extent) {
    return fill_volume(memory, value, extent, [](const Volume& rows) {
        return call(&Driver::cuMemsetD2D8_v2, rows.address, rows.pitch_bytes, rows.fill_byte, rows.extent.width,
                    rows.extent.height);
    });
}

} // namespace

GDRKIT_SYNC_FORM(cudaMemcpy)(void* to, const void* from, std::size_t length_bytes, int kind) {
    return run_entry_in_context([&] {
        return is_per_thread
                   ? wait_for_per_thread_stream(copy_in_stream(to, from, length_bytes, kind, per_thread_stream))
                   : copy(to, from, length_bytes, kind);
    });
}

GDRKIT_STREAM_FORM(cudaMemcpyAsync)(void* to, const void* from, std::size_t length_bytes, int kind, Handle stream) {
    return run_entry_in_context([&] { return copy_in_stream(to, from, length_bytes, kind, resolve_stream(stream)); });
}

GDRKIT_SYNC_FORM(cudaMemcpy2D)
(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width_bytes, std::size_t height,
 int kind) {
    return run_entry_in_context([&] {
        return check_and_copy_rows(to_pitch, from_pitch, width_bytes, height, kind, [&] {
            const cuda::Copy2d copy = make_rows_copy(to, to_pitch, from, from_pitch, width_bytes, height, kind);
            return is_per_thread
                       ? wait_for_per_thread_stream(call(&Driver::cuMemcpy2DAsync_v2, &copy, per_thread_stream))
                       : call(&Driver::cuMemcpy2DUnaligned_v2, &copy);
        });
    });
}

GDRKIT_STREAM_FORM(cudaMemcpy2DAsync)
(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width_bytes, std::size_t height,
 int kind, Handle stream) {
    return run_entry_in_context([&] {
        return check_and_copy_rows(to_pitch, from_pitch, width_bytes, height, kind, [&] {
            const cuda::Copy2d copy = make_rows_copy(to, to_pitch, from, from_pitch, width_bytes, height, kind);
            return call(&Driver::cuMemcpy2DAsync_v2, &copy, resolve_stream(stream));
        });
    });
}

GDRKIT_SYNC_FORM(cudaMemcpy3D)(const Copy3d* copy) {
    return run_entry_in_context([&] {
        return convert_and_run(copy, [](const cuda::Copy3d* converted) {
            return is_per_thread
                       ? wait_for_per_thread_stream(call(&Driver::cuMemcpy3DAsync_v2, converted, per_thread_stream))
                       : call(&Driver::cuMemcpy3D_v2, converted);
        });
    });
}

GDRKIT_STREAM_FORM(cudaMemcpy3DAsync)(const Copy3d* copy, Handle stream) {
    return run_entry_in_context([&] {
        return convert_and_run(copy, [&](const cuda::Copy3d* converted) {
            return call(&Driver::cuMemcpy3DAsync_v2, converted, resolve_stream(stream));
        });
    });
}

GDRKIT_SYNC_FORM(cudaMemcpy3DPeer)(const PeerCopy3d* copy) {
    return run_entry_in_context([&] {
        return convert_and_run(copy,
                               [](const cuda::Copy3d* converted) { return call(&Driver::cuMemcpy3DPeer, converted); });
    });
}

GDRKIT_STREAM_FORM(cudaMemcpy3DPeerAsync)(const PeerCopy3d* copy, Handle stream) {
    return run_entry_in_context([&] {
        return convert_and_run(copy, [&](const cuda::Copy3d* converted) {
            return call(&Driver::cuMemcpy3DPeerAsync, converted, resolve_stream(stream));
        });
    });
}

GDRKIT_SYNC_FORM(cudaMemset)(void* to, int value, std::size_t length_bytes) {
    return run_entry_in_context([&] {
        return is_per_thread ? wait_for_per_thread_stream(call(&Driver::cuMemsetD8Async, to_address(to), to_byte(value),
                                                               length_bytes, per_thread_stream))
                             : call(&Driver::cuMemsetD8_v2, to_address(to), to_byte(value), length_bytes);
    });
}

GDRKIT_STREAM_FORM(cudaMemsetAsync)(void* to, int value, std::size_t length_bytes, Handle stream) {
    return run_entry_in_context([&] {
        return call(&Driver::cuMemsetD8Async, to_address(to), to_byte(value), length_bytes, resolve_stream(stream));
    });
}

GDRKIT_SYNC_FORM(cudaMemset2D)(void* to, std::size_t pitch, int value, std::size_t width_bytes, std::size_t height) {
    return run_entry_in_context([&] {
        return is_per_thread
                   ? wait_for_per_thread_stream(call(&Driver::cuMemsetD2D8Async, to_address(to), pitch, to_byte(value),
                                                     width_bytes, height, per_thread_stream))
                   : call(&Driver::cuMemsetD2D8_v2, to_address(to), pitch, to_byte(value), width_bytes, height);
    });
}

GDRKIT_STREAM_FORM(cudaMemset2DAsync)
(void* to, std::size_t pitch, int value, std::size_t width_bytes, std::size_t height, Handle stream) {
    return run_entry_in_context([&] {
        return call(&Driver::cuMemsetD2D8Async, to_address(to), pitch, to_byte(value), width_bytes, height,
                    resolve_stream(stream));
    });
}

GDRKIT_SYNC_FORM(cudaMemset3D)(PitchedPointer memory, int value, Extent extent) {
    return run_entry_in_context([&] {
        return is_per_thread
                   ? wait_for_per_thread_stream(fill_volume_in_stream(memory, value, extent, per_thread_stream))
                   : fill_volume_synchronously(memory, value, extent);
    });
}

GDRKIT_STREAM_FORM(cudaMemset3DAsync)(PitchedPointer memory, int value, Extent extent, Handle stream) {
    return run_entry_in_context([&] { return fill_volume_in_stream(memory, value, extent, resolve_stream(stream)); });
}

// CUDA 13 removed the parameter for the index of the copy that failed.
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
    return run_entry_in_context([&] {
        return call(&Driver::cuMemcpyBatchAsync, to, from, lengths_bytes, count, attributes, attribute_indices,
                    attribute_count, failed_index, resolve_stream(stream));
    });
}

} // namespace gdrkit::twin::cudart
