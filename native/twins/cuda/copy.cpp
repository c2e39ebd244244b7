// cuMemcpy* and cuMemset*. Operands and bounds are checked when the function is called; the bytes are copied in stream
// order.
#include <algorithm>
#include <cstring>
#include <span>

#include "cuda/copy.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

enum class Access { read, write };

// One side of a copy: address ranges that this process can access, in order, and the objects that keep them alive.
struct Operand {
    std::vector<std::span<std::byte>> spans;
    std::vector<std::shared_ptr<void>> owners;
    bool pageable = false;    // unregistered host memory, which the driver copies through a staging buffer
    bool host = false;        // host memory, registered or not
    bool sync_memops = false; // one of its ranges has the attribute CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
};

bool has_access(const Range& range, const Context& context, Access access) {
    if (range.kind == MemoryKind::host_registered) {
        return access == Access::read || (range.host_flags & host_register_read_only) == 0;
    }
    const int needed = access == Access::read ? access_read : access_read_write;
    return (access_of(range, context.device) & needed) == needed;
}

// Resolve an address range to spans. Only adjacent VMM mappings may be crossed, because the program itself has mapped
// them side by side.
Result resolve_ranges(std::uint64_t address, std::uint64_t length_bytes, const Context& context, Access access,
                      Operand* operand) {
    const std::uint64_t end = address + length_bytes;
    for (std::uint64_t at = address; at < end;) {
        const RangeRef range = find_range(at);
        if (!range || !has_access(*range, context, access) || (at != address && range->kind != MemoryKind::vmm)) {
            return invalid_value;
        }
        const std::uint64_t chunk_end = std::min(end, range->base + range->length_bytes);
        if (chunk_end < end && range->kind != MemoryKind::vmm) {
            return invalid_value;
        }
        operand->spans.emplace_back(range->bytes(at), chunk_end - at);
        operand->owners.push_back(range);
        operand->host |= range->is_host();
        operand->sync_memops |= range->sync_memops.load();
        at = chunk_end;
    }
    return success;
}

Result resolve(std::uint64_t address, std::uint64_t length_bytes, const Context& context, OperandSide side,
               Access access, Operand* operand) {
    if (address == 0 || address + length_bytes < address) {
        return invalid_value;
    }
    if (find_range(address)) {
        return resolve_ranges(address, length_bytes, context, access, operand);
    }
    // Unregistered host memory must not overlap registered memory, and a device address must be allocated.
    if (side == OperandSide::device_only || is_device_address(address) || !ranges_in(address, length_bytes).empty()) {
        return invalid_value;
    }
    operand->spans.emplace_back(reinterpret_cast<std::byte*>(address), length_bytes);
    operand->pageable = operand->host = true;
    return success;
}

void copy_spans(const Operand& to, const Operand& from) {
    std::size_t source_index = 0, source_offset = 0;
    for (const std::span<std::byte> target : to.spans) {
        for (std::size_t at = 0; at < target.size();) {
            const std::span<std::byte> span = from.spans[source_index];
            const std::size_t count = std::min(target.size() - at, span.size() - source_offset);
            std::memmove(target.data() + at, span.data() + source_offset, count);
            at += count;
            source_offset += count;
            if (source_offset == span.size()) {
                ++source_index;
                source_offset = 0;
            }
        }
    }
}

// Copy pageable memory now: the real driver has read it before the call returns.
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
    const Result result = resolve(request.to, request.length_bytes, *context, request.to_side, Access::write, to);
    return result != success
               ? result
               : resolve(request.from, request.length_bytes, *context, request.from_side, Access::read, from);
}

// Carry out a synchronous copy in the legacy stream. Like the real driver, a copy within device memory returns before
// it is done, unless SYNC_MEMOPS is set.
Result copy_synchronous(const ContextRef& context, const CopyRequest& request) {
    if (request.length_bytes == 0) {
        return success;
    }
    Operand to, from;
    if (const Result result = resolve_operands(context, request, &to, &from); result != success) {
        return result;
    }
    const bool synchronous = to.host || from.host || to.sync_memops || from.sync_memops || syncs_memops(*context);
    const MarkerRef marker = enqueue(
        legacy_stream(context), [to = std::move(to), from = std::move(from)] { copy_spans(to, from); },
        synchronous ? Timing::immediate : Timing::delayed);
    if (synchronous) {
        wait_until_done(marker);
    }
    return success;
}

} // namespace

Result enqueue_copy(const ContextRef& context, const CopyRequest& request, Handle stream_handle) {
    StreamRef stream;
    if (const Result found = find_stream(stream_handle, context, &stream); found != success) {
        return found;
    }
    if (request.length_bytes == 0) {
        return success;
    }
    Operand to, from;
    if (const Result result = resolve_operands(context, request, &to, &from); result != success) {
        return result;
    }
    const bool synchronous = to.pageable;
    if (from.pageable && !synchronous) {
        stage_pageable(&from);
    }
    const MarkerRef marker = enqueue(
        stream, [to = std::move(to), from = std::move(from)] { copy_spans(to, from); }, Timing::delayed);
    if (synchronous) {
        wait_until_done(marker);
    }
    return success;
}

namespace {

// A memset: `count` values of `width_bytes` each.
struct Fill {
    DevicePointer to = 0;
    std::uint32_t value = 0;
    std::uint64_t width_bytes = 1;
    std::uint64_t count = 0;
};

void fill_bytes(const Operand& to, std::uint32_t value, std::uint64_t width_bytes) {
    std::byte pattern[4];
    std::memcpy(pattern, &value, sizeof pattern);
    std::uint64_t at = 0;
    for (const std::span<std::byte> span : to.spans) {
        for (std::byte& byte : span) {
            byte = pattern[at++ % width_bytes];
        }
    }
}

enum class SyncMode { if_required, asynchronous };

// Carry out a memset. On device memory even a synchronous memset returns before it is done, as with the real driver.
Result enqueue_fill(const ContextRef& context, const Fill& request, Handle stream_handle, SyncMode sync_mode) {
    StreamRef stream;
    if (const Result found = find_stream(stream_handle, context, &stream); found != success) {
        return found;
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
    if (const Result result = resolve(request.to, length_bytes, *context, OperandSide::device_only, Access::write, &to);
        result != success) {
        return result;
    }
    const bool synchronous =
        sync_mode == SyncMode::if_required && (to.host || to.sync_memops || syncs_memops(*context));
    const MarkerRef marker = enqueue(
        stream,
        [to = std::move(to), value = request.value, width = request.width_bytes] { fill_bytes(to, value, width); },
        Timing::delayed);
    if (synchronous) {
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
        return copy_synchronous(context, {to, from, length_bytes, OperandSide::any, OperandSide::any});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoD_v2(DevicePointer to, const void* from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyHtoD_v2", [&](const ContextRef& context) {
        return copy_synchronous(context,
                                {to, address_of(from), length_bytes, OperandSide::device_only, OperandSide::any});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoH_v2(void* to, DevicePointer from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyDtoH_v2", [&](const ContextRef& context) {
        return copy_synchronous(context,
                                {address_of(to), from, length_bytes, OperandSide::any, OperandSide::device_only});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoD_v2(DevicePointer to, DevicePointer from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyDtoD_v2", [&](const ContextRef& context) {
        return copy_synchronous(context, {to, from, length_bytes, OperandSide::device_only, OperandSide::device_only});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyPeer(DevicePointer to, Handle to_context, DevicePointer from, Handle from_context,
                                      std::size_t length_bytes) {
    return entry_in_context("cuMemcpyPeer", [&](const ContextRef& context) {
        return copy_peer(context, {to, from, length_bytes, OperandSide::device_only, OperandSide::device_only},
                         to_context, from_context);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyAsync(DevicePointer to, DevicePointer from, std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyAsync", [&](const ContextRef& context) {
        return enqueue_copy(context, {to, from, length_bytes, OperandSide::any, OperandSide::any}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t length_bytes,
                                              Handle stream) {
    return entry_in_context("cuMemcpyHtoDAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(context, {to, address_of(from), length_bytes, OperandSide::device_only, OperandSide::any},
                            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyDtoHAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(context, {address_of(to), from, length_bytes, OperandSide::any, OperandSide::device_only},
                            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t length_bytes,
                                              Handle stream) {
    return entry_in_context("cuMemcpyDtoDAsync_v2", [&](const ContextRef& context) {
        return enqueue_copy(context, {to, from, length_bytes, OperandSide::device_only, OperandSide::device_only},
                            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyPeerAsync(DevicePointer to, Handle to_context, DevicePointer from, Handle from_context,
                                           std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyPeerAsync", [&](const ContextRef& context) {
        ContextRef found;
        if (find_context(to_context, &found) != success || find_context(from_context, &found) != success) {
            return invalid_context;
        }
        return enqueue_copy(context, {to, from, length_bytes, OperandSide::device_only, OperandSide::device_only},
                            stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD8_v2(DevicePointer to, unsigned char value, std::size_t count) {
    return entry_in_context("cuMemsetD8_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 1, count}, stream_legacy, SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD16_v2(DevicePointer to, unsigned short value, std::size_t count) {
    return entry_in_context("cuMemsetD16_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 2, count}, stream_legacy, SyncMode::if_required);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD32_v2(DevicePointer to, unsigned value, std::size_t count) {
    return entry_in_context("cuMemsetD32_v2", [&](const ContextRef& context) {
        return enqueue_fill(context, {to, value, 4, count}, stream_legacy, SyncMode::if_required);
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
