// cuMemcpy*: operands and bounds are checked when the function is called; the bytes are copied in stream order.
#include "cuda/copy.hpp"

#include "cuda/capture.hpp"
#include "cuda/entry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

bool is_empty(const CopyRequest& request) {
    return request.to.width_bytes == 0 || request.to.height == 0 || request.to.depth == 0;
}

Result resolve_operands(const ContextRef& context, const CopyRequest& request, Operand* to, Operand* from) {
    // Check the source first, so that a copy with far too many rows fails before resolve_layout lists the rows of the
    // destination.
    Result result = check_layout(request.from, *context, request.from_memory, Access::read);
    if (result == success) {
        result = resolve_layout(request.to, *context, request.to_memory, Access::write, to);
    }
    return result != success ? result : resolve_layout(request.from, *context, request.from_memory, Access::read, from);
}

CopySide3d make_copy_side(const Layout& layout, AllowedMemory allowed_memory) {
    CopySide3d side{};
    side.memory_type = allowed_memory == AllowedMemory::any ? memory_unified : memory_device;
    side.device = layout.address;
    side.pitch_bytes = layout.pitch_bytes;
    side.height = layout.pitch_bytes == 0 ? 0 : layout.slice_bytes / layout.pitch_bytes;
    return side;
}

// Convert a captured copy to the description that a node of a graph stores.
Copy3d describe_copy(const CopyRequest& request) {
    return {make_copy_side(request.from, request.from_memory), make_copy_side(request.to, request.to_memory),
            request.to.width_bytes, request.to.height, request.to.depth};
}

} // namespace

CopyRequest make_contiguous_copy(std::uint64_t to, std::uint64_t from, std::uint64_t length_bytes,
                                 AllowedMemory to_memory, AllowedMemory from_memory) {
    return {{to, length_bytes}, {from, length_bytes}, to_memory, from_memory};
}

namespace {

// Check a synchronous copy, call `queue_work` to queue it, and wait until it is done if the real driver would wait.
template <typename QueueWork>
Result run_synchronous_copy(const ContextRef& context, const CopyRequest& request, QueueWork&& queue_work) {
    if (const Result result = refuse_legacy_stream_during_capture(context); result != success) {
        return result;
    }
    if (is_empty(request)) {
        return success;
    }
    Operand to, from;
    if (const Result result = resolve_operands(context, request, &to, &from); result != success) {
        return result;
    }
    const bool must_wait =
        to.is_host || from.is_host || to.has_sync_memops || from.has_sync_memops || is_sync_memops_set(*context);
    // Delay the copy only if the call returns before the copy is done. The delay then exposes a program that uses the
    // data too early.
    const MarkerRef marker = queue_work([to = std::move(to), from = std::move(from)] { copy_spans(to, from); },
                                        must_wait ? Timing::immediate : Timing::delayed);
    if (must_wait) {
        wait_until_done(marker);
    }
    return success;
}

} // namespace

Result prepare_copy(const ContextRef& context, const CopyRequest& request, std::function<void()>* work) {
    if (is_empty(request)) {
        *work = nullptr;
        return success;
    }
    Operand to, from;
    const Result result = resolve_operands(context, request, &to, &from);
    if (result == success) {
        *work = [to = std::move(to), from = std::move(from)] { copy_spans(to, from); };
    }
    return result;
}

Result copy_synchronous(const ContextRef& context, const CopyRequest& request) {
    return run_synchronous_copy(context, request, [&](std::function<void()> work, Timing timing) {
        return enqueue(get_legacy_stream(context), std::move(work), timing);
    });
}

Result enqueue_copy(const ContextRef& context, const CopyRequest& request, Handle stream_handle) {
    StreamRef stream;
    if (const Result result = find_stream(stream_handle, context, &stream, CapturePolicy::allow); result != success) {
        return result;
    }
    if (is_captured(stream)) {
        return capture_node(stream, CopyNode{describe_copy(request), context->handle});
    }
    if (is_empty(request)) {
        return success;
    }
    Operand to, from;
    if (const Result result = resolve_operands(context, request, &to, &from); result != success) {
        return result;
    }
    const bool must_wait = to.is_pageable;
    if (from.is_pageable && !must_wait) {
        stage_pageable_source(&from);
    }
    const MarkerRef marker = enqueue(
        stream, [to = std::move(to), from = std::move(from)] { copy_spans(to, from); }, Timing::delayed);
    if (must_wait) {
        wait_until_done(marker);
    }
    return success;
}

Result copy_peer(const ContextRef& context, const CopyRequest& request, Handle to_context_handle,
                 Handle from_context_handle) {
    ContextRef to_context, from_context;
    if (find_context(to_context_handle, &to_context) != success ||
        find_context(from_context_handle, &from_context) != success) {
        return invalid_context;
    }
    return run_synchronous_copy(context, request, [&](std::function<void()> work, Timing timing) {
        return enqueue_barrier(get_legacy_stream(context), std::move(work), timing,
                               {context, to_context, from_context});
    });
}

Result enqueue_copy_peer(const ContextRef& context, const CopyRequest& request, Handle to_context_handle,
                         Handle from_context_handle, Handle stream_handle) {
    ContextRef to_context, from_context;
    if (find_context(to_context_handle, &to_context) != success ||
        find_context(from_context_handle, &from_context) != success) {
        return invalid_context;
    }
    return enqueue_copy(context, request, stream_handle);
}

namespace {

std::uint64_t to_address(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemcpy(DevicePointer to, DevicePointer from, std::size_t length_bytes) {
    return run_entry_in_context("cuMemcpy", [&](const ContextRef& context) {
        return copy_synchronous(context, make_contiguous_copy(to, from, length_bytes));
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoD_v2(DevicePointer to, const void* from, std::size_t length_bytes) {
    return run_entry_in_context("cuMemcpyHtoD_v2", [&](const ContextRef& context) {
        return copy_synchronous(context, make_contiguous_copy(to, to_address(from), length_bytes,
                                                              AllowedMemory::device_only, AllowedMemory::any));
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoH_v2(void* to, DevicePointer from, std::size_t length_bytes) {
    return run_entry_in_context("cuMemcpyDtoH_v2", [&](const ContextRef& context) {
        return copy_synchronous(context, make_contiguous_copy(to_address(to), from, length_bytes, AllowedMemory::any,
                                                              AllowedMemory::device_only));
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoD_v2(DevicePointer to, DevicePointer from, std::size_t length_bytes) {
    return run_entry_in_context("cuMemcpyDtoD_v2", [&](const ContextRef& context) {
        return copy_synchronous(context, make_contiguous_copy(to, from, length_bytes, AllowedMemory::device_only,
                                                              AllowedMemory::device_only));
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyPeer(DevicePointer to, Handle to_context, DevicePointer from, Handle from_context,
                                      std::size_t length_bytes) {
    return run_entry_in_context("cuMemcpyPeer", [&](const ContextRef& context) {
        return copy_peer(
            context,
            make_contiguous_copy(to, from, length_bytes, AllowedMemory::device_only, AllowedMemory::device_only),
            to_context, from_context);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyAsync(DevicePointer to, DevicePointer from, std::size_t length_bytes, Handle stream) {
    return run_entry_in_context("cuMemcpyAsync", [&](const ContextRef& context) {
        return enqueue_copy(context, make_contiguous_copy(to, from, length_bytes), stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t length_bytes,
                                              Handle stream) {
    return run_entry_in_context("cuMemcpyHtoDAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(
            context,
            make_contiguous_copy(to, to_address(from), length_bytes, AllowedMemory::device_only, AllowedMemory::any),
            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t length_bytes, Handle stream) {
    return run_entry_in_context("cuMemcpyDtoHAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(
            context,
            make_contiguous_copy(to_address(to), from, length_bytes, AllowedMemory::any, AllowedMemory::device_only),
            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t length_bytes,
                                              Handle stream) {
    return run_entry_in_context("cuMemcpyDtoDAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(
            context,
            make_contiguous_copy(to, from, length_bytes, AllowedMemory::device_only, AllowedMemory::device_only),
            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyPeerAsync(DevicePointer to, Handle to_context, DevicePointer from, Handle from_context,
                                           std::size_t length_bytes, Handle stream) {
    return run_entry_in_context("cuMemcpyPeerAsync", [&](const ContextRef& context) {
        return enqueue_copy_peer(
            context,
            make_contiguous_copy(to, from, length_bytes, AllowedMemory::device_only, AllowedMemory::device_only),
            to_context, from_context, stream);
    });
}

} // namespace gdrkit::twin::cuda
