// Copies to and from arrays, in the ordinary form and the per-thread form (forms.hpp). The elements of an array are in
// rows without gaps.
#include "cudart/forms.hpp"
#include "cudart/rows.hpp"

namespace gdrkit::twin::cudart {
namespace {

// Describe one side of a 2D copy: memory with a pitch, or an array.
cuda::CopySide2d make_memory_side(const void* memory, std::size_t pitch_bytes, std::uint32_t memory_type) {
    return {0, 0, memory_type, memory, to_address(memory), nullptr, pitch_bytes};
}

cuda::CopySide2d make_array_side(Handle array, std::size_t x_bytes, std::size_t y) {
    return {x_bytes, y, cuda::memory_array, nullptr, 0, reinterpret_cast<void*>(array), 0};
}

// Check and run a copy of rows. `pitch_bytes` is the pitch of the memory, or the width of the copy if both sides are
// arrays. `stream` is null for a synchronous function, which copies in the default stream of its form.
Error copy_rows(const cuda::Copy2d& copy, std::size_t pitch_bytes, int kind, const Handle* stream) {
    if (copy.width_bytes == 0 || copy.height == 0) {
        return success;
    }
    if (!is_valid_copy_kind(kind)) {
        return invalid_memcpy_direction;
    }
    if (copy.width_bytes > pitch_bytes) {
        return invalid_pitch_value;
    }
    if (stream != nullptr) {
        return call(&Driver::cuMemcpy2DAsync_v2, &copy, resolve_stream(*stream));
    }
    return is_per_thread ? wait_for_per_thread_stream(call(&Driver::cuMemcpy2DAsync_v2, &copy, per_thread_stream))
                         : call(&Driver::cuMemcpy2DUnaligned_v2, &copy);
}

Error copy_rows_to_array(Handle array, std::size_t x_bytes, std::size_t y, const void* from, std::size_t pitch_bytes,
                         std::size_t width_bytes, std::size_t height, int kind, const Handle* stream) {
    return run_entry_in_context([&] {
        return copy_rows({make_memory_side(from, pitch_bytes, get_source_memory_type(kind)),
                          make_array_side(array, x_bytes, y), width_bytes, height},
                         pitch_bytes, kind, stream);
    });
}

Error copy_rows_from_array(void* to, std::size_t pitch_bytes, Handle array, std::size_t x_bytes, std::size_t y,
                           std::size_t width_bytes, std::size_t height, int kind, const Handle* stream) {
    return run_entry_in_context([&] {
        return copy_rows({make_array_side(array, x_bytes, y),
                          make_memory_side(to, pitch_bytes, get_destination_memory_type(kind)), width_bytes, height},
                         pitch_bytes, kind, stream);
    });
}

// Store the offset of a position from the beginning of the array. The rows of an array have no gaps.
Error compute_offset(Handle array, std::size_t x_bytes, std::size_t y, std::size_t* offset_bytes) {
    std::size_t row_bytes = 0;
    const Error error = get_row_bytes(array, &row_bytes);
    *offset_bytes = y * row_bytes + x_bytes;
    return error;
}

// Copy contiguous memory to a range of an array. The range may continue in the next rows.
Error copy_range_to_array(Handle array, std::size_t x_bytes, std::size_t y, const void* from, std::size_t length_bytes,
                          int kind, Handle stream) {
    return run_entry_in_context([&] {
        std::size_t offset_bytes = 0;
        if (const Error error = compute_offset(array, x_bytes, y, &offset_bytes);
            error != success || !is_valid_copy_kind(kind)) {
            return error == success ? invalid_memcpy_direction : error;
        }
        return call(&Driver::cuMemcpyHtoAAsync_v2, array, offset_bytes, from, length_bytes, resolve_stream(stream));
    });
}

Error copy_range_from_array(void* to, Handle array, std::size_t x_bytes, std::size_t y, std::size_t length_bytes,
                            int kind, Handle stream) {
    return run_entry_in_context([&] {
        std::size_t offset_bytes = 0;
        if (const Error error = compute_offset(array, x_bytes, y, &offset_bytes);
            error != success || !is_valid_copy_kind(kind)) {
            return error == success ? invalid_memcpy_direction : error;
        }
        return call(&Driver::cuMemcpyAtoHAsync_v2, to, array, offset_bytes, length_bytes, resolve_stream(stream));
    });
}

// `error` is the result of a copy in the default stream of this form. If the copy was queued, wait for that stream.
Error wait_for_default_stream(Error error) {
    return error == success ? record_error(call(&Driver::cuStreamSynchronize, resolve_stream(0))) : error;
}

} // namespace

GDRKIT_SYNC_FORM(cudaMemcpy2DToArray)
(Handle array, std::size_t x_bytes, std::size_t y, const void* from, std::size_t pitch_bytes, std::size_t width_bytes,
 std::size_t height, int kind) {
    return copy_rows_to_array(array, x_bytes, y, from, pitch_bytes, width_bytes, height, kind, nullptr);
}

GDRKIT_STREAM_FORM(cudaMemcpy2DToArrayAsync)
(Handle array, std::size_t x_bytes, std::size_t y, const void* from, std::size_t pitch_bytes, std::size_t width_bytes,
 std::size_t height, int kind, Handle stream) {
    return copy_rows_to_array(array, x_bytes, y, from, pitch_bytes, width_bytes, height, kind, &stream);
}

GDRKIT_SYNC_FORM(cudaMemcpy2DFromArray)
(void* to, std::size_t pitch_bytes, Handle array, std::size_t x_bytes, std::size_t y, std::size_t width_bytes,
 std::size_t height, int kind) {
    return copy_rows_from_array(to, pitch_bytes, array, x_bytes, y, width_bytes, height, kind, nullptr);
}

GDRKIT_STREAM_FORM(cudaMemcpy2DFromArrayAsync)
(void* to, std::size_t pitch_bytes, Handle array, std::size_t x_bytes, std::size_t y, std::size_t width_bytes,
 std::size_t height, int kind, Handle stream) {
    return copy_rows_from_array(to, pitch_bytes, array, x_bytes, y, width_bytes, height, kind, &stream);
}

GDRKIT_SYNC_FORM(cudaMemcpy2DArrayToArray)
(Handle to, std::size_t to_x_bytes, std::size_t to_y, Handle from, std::size_t from_x_bytes, std::size_t from_y,
 std::size_t width_bytes, std::size_t height, int kind) {
    return run_entry_in_context([&] {
        return copy_rows(
            {make_array_side(from, from_x_bytes, from_y), make_array_side(to, to_x_bytes, to_y), width_bytes, height},
            width_bytes, kind, nullptr);
    });
}

GDRKIT_SYNC_FORM(cudaMemcpyToArray)
(Handle array, std::size_t x_bytes, std::size_t y, const void* from, std::size_t length_bytes, int kind) {
    return wait_for_default_stream(copy_range_to_array(array, x_bytes, y, from, length_bytes, kind, 0));
}

GDRKIT_STREAM_FORM(cudaMemcpyToArrayAsync)
(Handle array, std::size_t x_bytes, std::size_t y, const void* from, std::size_t length_bytes, int kind,
 Handle stream) {
    return copy_range_to_array(array, x_bytes, y, from, length_bytes, kind, stream);
}

GDRKIT_SYNC_FORM(cudaMemcpyFromArray)
(void* to, Handle array, std::size_t x_bytes, std::size_t y, std::size_t length_bytes, int kind) {
    return wait_for_default_stream(copy_range_from_array(to, array, x_bytes, y, length_bytes, kind, 0));
}

GDRKIT_STREAM_FORM(cudaMemcpyFromArrayAsync)
(void* to, Handle array, std::size_t x_bytes, std::size_t y, std::size_t length_bytes, int kind, Handle stream) {
    return copy_range_from_array(to, array, x_bytes, y, length_bytes, kind, stream);
}

GDRKIT_SYNC_FORM(cudaMemcpyArrayToArray)
(Handle to, std::size_t to_x_bytes, std::size_t to_y, Handle from, std::size_t from_x_bytes, std::size_t from_y,
 std::size_t length_bytes, int) {
    return run_entry_in_context([&] {
        std::size_t to_offset_bytes = 0, from_offset_bytes = 0;
        Error error = compute_offset(to, to_x_bytes, to_y, &to_offset_bytes);
        if (error == success) {
            error = compute_offset(from, from_x_bytes, from_y, &from_offset_bytes);
        }
        return error == success
                   ? call(&Driver::cuMemcpyAtoA_v2, to, to_offset_bytes, from, from_offset_bytes, length_bytes)
                   : error;
    });
}

} // namespace gdrkit::twin::cudart
