// cuMemset*: bounds are checked when the function is called; the bytes are written in stream order.
#include <algorithm>
#include <cstring>

#include "cuda/capture.hpp"
#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/fill.hpp"
#include "cuda/operand.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// A memset: `row_value_count` values of `element_bytes` each are written to each row. The first row begins at the
// address `to`.
struct Fill {
    DevicePointer to = 0;
    std::uint32_t value = 0;
    std::uint64_t element_bytes = 1;
    std::uint64_t row_value_count = 0;
    std::uint64_t row_count = 1;
    std::uint64_t pitch_bytes = 0; // the distance between two rows; unused if there is only one row
};

// Compute the layout of the bytes of a memset. Fail with invalid_value unless each row begins at a multiple of the size
// of a value, and no rows overlap.
Result compute_layout(const Fill& request, Layout* layout) {
    std::uint64_t row_bytes = 0;
    if (request.to % request.element_bytes != 0 ||
        __builtin_mul_overflow(request.row_value_count, request.element_bytes, &row_bytes)) {
        return invalid_value;
    }
    const bool is_valid_pitch = request.pitch_bytes >= row_bytes && request.pitch_bytes <= max_pitch_bytes &&
                                request.pitch_bytes % request.element_bytes == 0;
    if (request.row_count > 1 && !is_valid_pitch) {
        return invalid_value;
    }
    *layout = {request.to, row_bytes, request.row_count, 1, request.pitch_bytes};
    return success;
}

void fill_bytes(const Operand& to, std::uint32_t value, std::uint64_t element_bytes) {
    const auto lock = lock_views();
    std::byte pattern[4];
    std::memcpy(pattern, &value, sizeof pattern);
    std::uint64_t byte_index = 0;
    for (const std::span<std::byte> span : to.spans) {
        if (element_bytes == 1) { // the fast path of the loop below
            std::ranges::fill(span, pattern[0]);
            continue;
        }
        for (std::byte& byte : span) {
            byte = pattern[byte_index++ % element_bytes];
        }
    }
    std::ranges::for_each(to.viewed_bytes, update_view);
}

// SyncMode says whether a call waits for its memset: with `if_required`, the call waits in the cases in which a
// synchronous memset of the real driver waits; with `asynchronous`, it never waits.
enum class SyncMode { if_required, asynchronous };

// Queue a memset. As with the real driver, even a call with SyncMode::if_required does not wait for a memset of device
// memory, unless SYNC_MEMOPS is set for the memory or the context.
Result enqueue_fill(const ContextRef& context, const Fill& request, Handle stream_handle, SyncMode sync_mode) {
    StreamRef stream;
    if (const Result result = find_stream(stream_handle, context, &stream, CapturePolicy::allow); result != success) {
        return result;
    }
    if (is_captured(stream)) {
        const FillParameters parameters{request.to,
                                        request.pitch_bytes,
                                        request.value,
                                        static_cast<std::uint32_t>(request.element_bytes),
                                        request.row_value_count,
                                        request.row_count};
        return capture_node(stream, FillNode{parameters, context->handle});
    }
    Layout layout;
    if (const Result result = compute_layout(request, &layout); result != success) {
        return result;
    }
    if (layout.width_bytes == 0 || layout.height == 0) {
        return success;
    }
    Operand to;
    if (const Result result = resolve_layout(layout, *context, AllowedMemory::device_only, Access::write, &to);
        result != success) {
        return result;
    }
    const bool must_wait =
        sync_mode == SyncMode::if_required && (to.is_host || to.has_sync_memops || is_sync_memops_set(*context));
    const MarkerRef marker = enqueue(
        stream,
        [to = std::move(to), value = request.value, element_bytes = request.element_bytes] {
            fill_bytes(to, value, element_bytes);
        },
        Timing::delayed);
    if (must_wait) {
        wait_until_done(marker);
    }
    return success;
}

} // namespace

Result prepare_fill(const ContextRef& context, const FillParameters& parameters, std::function<void()>* work) {
    const std::uint32_t element_bytes = parameters.element_bytes;
    Layout layout;
    if (element_bytes != 1 && element_bytes != 2 && element_bytes != 4) {
        return invalid_value;
    }
    Result result = compute_layout(
        {parameters.to, parameters.value, element_bytes, parameters.width, parameters.height, parameters.pitch_bytes},
        &layout);
    if (result != success || layout.width_bytes == 0 || layout.height == 0) {
        *work = nullptr;
        return result;
    }
    Operand to;
    result = resolve_layout(layout, *context, AllowedMemory::device_only, Access::write, &to);
    if (result == success) {
        *work = [to = std::move(to), value = parameters.value, element_bytes] { fill_bytes(to, value, element_bytes); };
    }
    return result;
}

GDRKIT_CUDA_ENTRY Result cuMemsetD8_v2(DevicePointer to, unsigned char value, std::size_t value_count) {
    return run_entry_in_context("cuMemsetD8_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 1, value_count}, legacy_stream_handle, SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD16_v2(DevicePointer to, unsigned short value, std::size_t value_count) {
    return run_entry_in_context("cuMemsetD16_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 2, value_count}, legacy_stream_handle, SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD32_v2(DevicePointer to, unsigned value, std::size_t value_count) {
    return run_entry_in_context("cuMemsetD32_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 4, value_count}, legacy_stream_handle, SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD8Async(DevicePointer to, unsigned char value, std::size_t value_count,
                                         Handle stream) {
    return run_entry_in_context("cuMemsetD8Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 1, value_count}, stream, SyncMode::asynchronous);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD16Async(DevicePointer to, unsigned short value, std::size_t value_count,
                                          Handle stream) {
    return run_entry_in_context("cuMemsetD16Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 2, value_count}, stream, SyncMode::asynchronous);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD32Async(DevicePointer to, unsigned value, std::size_t value_count, Handle stream) {
    return run_entry_in_context("cuMemsetD32Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 4, value_count}, stream, SyncMode::asynchronous);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD2D8_v2(DevicePointer to, std::size_t pitch_bytes, unsigned char value,
                                         std::size_t value_count, std::size_t row_count) {
    return run_entry_in_context("cuMemsetD2D8_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 1, value_count, row_count, pitch_bytes}, legacy_stream_handle,
                            SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD2D16_v2(DevicePointer to, std::size_t pitch_bytes, unsigned short value,
                                          std::size_t value_count, std::size_t row_count) {
    return run_entry_in_context("cuMemsetD2D16_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 2, value_count, row_count, pitch_bytes}, legacy_stream_handle,
                            SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD2D32_v2(DevicePointer to, std::size_t pitch_bytes, unsigned value,
                                          std::size_t value_count, std::size_t row_count) {
    return run_entry_in_context("cuMemsetD2D32_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 4, value_count, row_count, pitch_bytes}, legacy_stream_handle,
                            SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD2D8Async(DevicePointer to, std::size_t pitch_bytes, unsigned char value,
                                           std::size_t value_count, std::size_t row_count, Handle stream) {
    return run_entry_in_context("cuMemsetD2D8Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 1, value_count, row_count, pitch_bytes}, stream,
                            SyncMode::asynchronous);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD2D16Async(DevicePointer to, std::size_t pitch_bytes, unsigned short value,
                                            std::size_t value_count, std::size_t row_count, Handle stream) {
    return run_entry_in_context("cuMemsetD2D16Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 2, value_count, row_count, pitch_bytes}, stream,
                            SyncMode::asynchronous);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD2D32Async(DevicePointer to, std::size_t pitch_bytes, unsigned value,
                                            std::size_t value_count, std::size_t row_count, Handle stream) {
    return run_entry_in_context("cuMemsetD2D32Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 4, value_count, row_count, pitch_bytes}, stream,
                            SyncMode::asynchronous);
    });
}

} // namespace gdrkit::twin::cuda
