// cuMemcpy* and cuMemset*. Operands and bounds are checked when the function is called; the bytes are copied in stream
// order.
#include <algorithm>
#include <cstring>
#include <span>

#include "cuda/copy.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "model/usage.hpp"

namespace gdrkit::twin::cuda {
namespace {

enum class Access { read, write };

// The source or the destination of a copy: where this process can access its bytes, in order, and the objects that keep
// this memory alive.
struct Operand {
    std::vector<std::span<std::byte>> spans;
    std::vector<ViewedBytes> viewed; // of a destination: the bytes of which the GPU has a view
    std::vector<std::shared_ptr<void>> owners;
    bool is_pageable = false;     // unregistered host memory, which the driver copies through a staging buffer
    bool is_host = false;         // host memory, registered or not
    bool has_sync_memops = false; // a range has the attribute CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
};

bool has_access(const Range& range, const Context& context, Access access) {
    if (range.kind == MemoryKind::host_registered) {
        return access == Access::read || (range.host_flags & host_register_read_only) == 0;
    }
    const int needed = access == Access::read ? access_read : access_read_write;
    return (access_of(range, context.device) & needed) == needed;
}

void add_span(const Range& range, std::uint64_t address, std::uint64_t length_bytes, Access access, Operand* operand) {
    const std::span<std::byte> bytes(range.bytes(address), length_bytes);
    std::byte* const view = range.memory ? range.memory->view_of(bytes.data()) : nullptr;
    if (view != nullptr && access == Access::write) {
        operand->viewed.push_back({bytes, view});
    }
    operand->spans.push_back(view != nullptr && access == Access::read ? std::span(view, length_bytes) : bytes);
}

// Resolve an address range to spans. It must lie in one allocation or, because a program may map VMM memory side by
// side, in adjacent VMM mappings.
Result resolve_ranges(std::uint64_t address, std::uint64_t length_bytes, const Context& context, Access access,
                      Operand* operand) {
    const std::uint64_t end = address + length_bytes;
    for (std::uint64_t position = address; position < end;) {
        const RangeRef range = find_range(position);
        if (!range || !has_access(*range, context, access) || (position != address && range->kind != MemoryKind::vmm)) {
            return invalid_value;
        }
        const std::uint64_t chunk_end = std::min(end, range->base + range->length_bytes);
        if (chunk_end < end && range->kind != MemoryKind::vmm) {
            return invalid_value;
        }
        add_span(*range, position, chunk_end - position, access, operand);
        operand->owners.push_back(range);
        operand->is_host |= range->is_host();
        operand->has_sync_memops |= range->sync_memops.load();
        position = chunk_end;
    }
    return success;
}

// Resolve one side of a copy. Fails with invalid_value if the memory is not allocated, not accessible or not allowed.
Result resolve_operand(std::uint64_t address, std::uint64_t length_bytes, const Context& context, AllowedMemory allowed,
                       Access access, Operand* operand) {
    if (address == 0 || address + length_bytes < address) {
        return invalid_value;
    }
    if (find_range(address)) {
        return resolve_ranges(address, length_bytes, context, access, operand);
    }
    // Unregistered host memory must not overlap registered memory, and a device address must be allocated.
    if (allowed == AllowedMemory::device_only || is_device_address(address) ||
        !ranges_in(address, length_bytes).empty()) {
        return invalid_value;
    }
    operand->spans.emplace_back(reinterpret_cast<std::byte*>(address), length_bytes);
    operand->is_pageable = operand->is_host = true;
    return success;
}

void copy_spans(const Operand& to, const Operand& from) {
    const auto lock = lock_views();
    std::size_t source_index = 0, source_offset = 0;
    for (const std::span<std::byte> target : to.spans) {
        record_bytes(target.size());
        for (std::size_t offset = 0; offset < target.size();) {
            const std::span<std::byte> span = from.spans[source_index];
            const std::size_t length_bytes = std::min(target.size() - offset, span.size() - source_offset);
            std::memmove(target.data() + offset, span.data() + source_offset, length_bytes);
            offset += length_bytes;
            source_offset += length_bytes;
            if (source_offset == span.size()) {
                ++source_index;
                source_offset = 0;
            }
        }
    }
    std::ranges::for_each(to.viewed, show);
}

// Copy a pageable source to a staging buffer now, because the real driver reads it before the call returns.
void stage_pageable(Operand* operand) {
    std::size_t length_bytes = 0;
    for (const auto& span : operand->spans) {
        length_bytes += span.size();
    }
    auto staged = std::make_shared<std::vector<std::byte>>();
    staged->reserve(length_bytes);
    for (const auto& span : operand->spans) {
        staged->insert(staged->end(), span.begin(), span.end());
    }
    operand->spans.assign(1, std::span(*staged));
    operand->owners.assign(1, std::move(staged));
}

Result resolve_operands(const ContextRef& context, const CopyRequest& request, Operand* to, Operand* from) {
    const Result result =
        resolve_operand(request.to, request.length_bytes, *context, request.to_memory, Access::write, to);
    return result != success
               ? result
               : resolve_operand(request.from, request.length_bytes, *context, request.from_memory, Access::read, from);
}

// Carry out a synchronous copy in the legacy default stream. As with the real driver, the call returns before a copy
// within device memory is done, unless SYNC_MEMOPS is set.
Result copy_synchronous(const ContextRef& context, const CopyRequest& request) {
    if (request.length_bytes == 0) {
        return success;
    }
    Operand to, from;
    if (const Result result = resolve_operands(context, request, &to, &from); result != success) {
        return result;
    }
    const bool must_wait =
        to.is_host || from.is_host || to.has_sync_memops || from.has_sync_memops || syncs_memops(*context);
    // Delay the copy only if the call returns before the copy is done. The delay then exposes a program that uses the
    // data too early.
    const MarkerRef marker = enqueue(
        legacy_stream(context), [to = std::move(to), from = std::move(from)] { copy_spans(to, from); },
        must_wait ? Timing::immediate : Timing::delayed);
    if (must_wait) {
        wait_until_done(marker);
    }
    return success;
}

} // namespace

Result enqueue_copy(const ContextRef& context, const CopyRequest& request, Handle stream_handle) {
    StreamRef stream;
    if (const Result result = find_stream(stream_handle, context, &stream); result != success) {
        return result;
    }
    if (request.length_bytes == 0) {
        return success;
    }
    Operand to, from;
    if (const Result result = resolve_operands(context, request, &to, &from); result != success) {
        return result;
    }
    const bool must_wait = to.is_pageable;
    if (from.is_pageable && !must_wait) {
        stage_pageable(&from);
    }
    const MarkerRef marker = enqueue(
        stream, [to = std::move(to), from = std::move(from)] { copy_spans(to, from); }, Timing::delayed);
    if (must_wait) {
        wait_until_done(marker);
    }
    return success;
}

namespace {

// A memset: `count` values of `width_bytes` each are written to the address `to`.
struct Fill {
    DevicePointer to = 0;
    std::uint32_t value = 0;
    std::uint64_t width_bytes = 1;
    std::uint64_t count = 0;
};

void fill_bytes(const Operand& to, std::uint32_t value, std::uint64_t width_bytes) {
    const auto lock = lock_views();
    std::byte pattern[4];
    std::memcpy(pattern, &value, sizeof pattern);
    std::uint64_t offset = 0;
    for (const std::span<std::byte> span : to.spans) {
        if (width_bytes == 1) {
            std::ranges::fill(span, pattern[0]);
            continue;
        }
        for (std::byte& byte : span) {
            byte = pattern[offset++ % width_bytes];
        }
    }
    std::ranges::for_each(to.viewed, show);
}

// if_required: the call waits for the memset in the cases in which the real driver's synchronous memset waits.
enum class SyncMode { if_required, asynchronous };

// Queue a memset. As with the real driver, even the synchronous function returns before a memset of device memory is
// done, unless SYNC_MEMOPS is set.
Result enqueue_fill(const ContextRef& context, const Fill& request, Handle stream_handle, SyncMode sync_mode) {
    StreamRef stream;
    if (const Result result = find_stream(stream_handle, context, &stream); result != success) {
        return result;
    }
    std::uint64_t length_bytes = 0;
    if (request.to % request.width_bytes != 0 ||
        __builtin_mul_overflow(request.count, request.width_bytes, &length_bytes)) {
        return invalid_value;
    }
    if (length_bytes == 0) {
        return success;
    }
    Operand to;
    if (const Result result =
            resolve_operand(request.to, length_bytes, *context, AllowedMemory::device_only, Access::write, &to);
        result != success) {
        return result;
    }
    const bool must_wait =
        sync_mode == SyncMode::if_required && (to.is_host || to.has_sync_memops || syncs_memops(*context));
    const MarkerRef marker = enqueue(
        stream,
        [to = std::move(to), value = request.value, width = request.width_bytes] { fill_bytes(to, value, width); },
        Timing::delayed);
    if (must_wait) {
        wait_until_done(marker);
    }
    return success;
}

Result copy_peer(const ContextRef& context, const CopyRequest& request, Handle to_context, Handle from_context) {
    ContextRef to, from;
    if (find_context(to_context, &to) != success || find_context(from_context, &from) != success) {
        return invalid_context;
    }
    // A peer copy waits for all work of both contexts.
    synchronise(to);
    synchronise(from);
    return copy_synchronous(context, request);
}

std::uint64_t address_of(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemcpy(DevicePointer to, DevicePointer from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpy", [&](const ContextRef& context) {
        return copy_synchronous(context, {to, from, length_bytes, AllowedMemory::any, AllowedMemory::any});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoD_v2(DevicePointer to, const void* from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyHtoD_v2", [&](const ContextRef& context) {
        return copy_synchronous(context,
                                {to, address_of(from), length_bytes, AllowedMemory::device_only, AllowedMemory::any});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoH_v2(void* to, DevicePointer from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyDtoH_v2", [&](const ContextRef& context) {
        return copy_synchronous(context,
                                {address_of(to), from, length_bytes, AllowedMemory::any, AllowedMemory::device_only});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoD_v2(DevicePointer to, DevicePointer from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyDtoD_v2", [&](const ContextRef& context) {
        return copy_synchronous(context,
                                {to, from, length_bytes, AllowedMemory::device_only, AllowedMemory::device_only});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyPeer(DevicePointer to, Handle to_context, DevicePointer from, Handle from_context,
                                      std::size_t length_bytes) {
    return entry_in_context("cuMemcpyPeer", [&](const ContextRef& context) {
        return copy_peer(context, {to, from, length_bytes, AllowedMemory::device_only, AllowedMemory::device_only},
                         to_context, from_context);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyAsync(DevicePointer to, DevicePointer from, std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyAsync", [&](const ContextRef& context) {
        return enqueue_copy(context, {to, from, length_bytes, AllowedMemory::any, AllowedMemory::any}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t length_bytes,
                                              Handle stream) {
    return entry_in_context("cuMemcpyHtoDAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(
            context, {to, address_of(from), length_bytes, AllowedMemory::device_only, AllowedMemory::any}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyDtoHAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(
            context, {address_of(to), from, length_bytes, AllowedMemory::any, AllowedMemory::device_only}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t length_bytes,
                                              Handle stream) {
    return entry_in_context("cuMemcpyDtoDAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(context, {to, from, length_bytes, AllowedMemory::device_only, AllowedMemory::device_only},
                            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyPeerAsync(DevicePointer to, Handle to_context, DevicePointer from, Handle from_context,
                                           std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyPeerAsync", [&](const ContextRef& context) {
        // Both contexts must exist. The copy itself does not use them.
        ContextRef to_ref, from_ref;
        if (find_context(to_context, &to_ref) != success || find_context(from_context, &from_ref) != success) {
            return invalid_context;
        }
        return enqueue_copy(context, {to, from, length_bytes, AllowedMemory::device_only, AllowedMemory::device_only},
                            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD8_v2(DevicePointer to, unsigned char value, std::size_t count) {
    return entry_in_context("cuMemsetD8_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 1, count}, legacy_stream_handle, SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD16_v2(DevicePointer to, unsigned short value, std::size_t count) {
    return entry_in_context("cuMemsetD16_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 2, count}, legacy_stream_handle, SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD32_v2(DevicePointer to, unsigned value, std::size_t count) {
    return entry_in_context("cuMemsetD32_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 4, count}, legacy_stream_handle, SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD8Async(DevicePointer to, unsigned char value, std::size_t count, Handle stream) {
    return entry_in_context("cuMemsetD8Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 1, count}, stream, SyncMode::asynchronous);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD16Async(DevicePointer to, unsigned short value, std::size_t count, Handle stream) {
    return entry_in_context("cuMemsetD16Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 2, count}, stream, SyncMode::asynchronous);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD32Async(DevicePointer to, unsigned value, std::size_t count, Handle stream) {
    return entry_in_context("cuMemsetD32Async", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 4, count}, stream, SyncMode::asynchronous);
    });
}

} // namespace gdrkit::twin::cuda
