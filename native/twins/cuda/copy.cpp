// Copies and fills. Operands are resolved, with their bounds, when the call is made; the bytes move when their turn
// comes.
#include <algorithm>
#include <cstring>
#include <span>

#include "cuda/copy.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

enum class Use { read, write };

// One side of a copy: bytes that this process can reach, in order, and what keeps them alive.
struct Operand {
    std::vector<std::span<std::byte>> pieces;
    std::vector<std::shared_ptr<void>> keep;
    bool pageable = false;    // plain host memory, which the driver stages
    bool host = false;        // host memory of any kind
    bool sync_memops = false; // some range of it asks that synchronous calls really are
};

bool allowed(const Range& range, const Context& context, Use use) {
    if (range.kind == Kind::host_registered) {
        return use == Use::read || (range.host_flags & host_register_read_only) == 0;
    }
    const int needed = use == Use::read ? access_read : access_read_write;
    return (access_of(range, context.device) & needed) == needed;
}

// Only mapped VMM chunks may be crossed: they are one range of addresses by the program's own will.
Result resolve_ranges(std::uint64_t address, std::uint64_t length_bytes, const Context& context, Use use,
                      Operand* operand) {
    const std::uint64_t end = address + length_bytes;
    for (std::uint64_t at = address; at < end;) {
        const RangeRef range = find_range(at);
        if (!range || !allowed(*range, context, use) || (at != address && range->kind != Kind::vmm)) {
            return invalid_value;
        }
        const std::uint64_t stop = std::min(end, range->base + range->length_bytes);
        if (stop < end && range->kind != Kind::vmm) {
            return invalid_value;
        }
        operand->pieces.emplace_back(range->bytes(at), stop - at);
        operand->keep.push_back(range);
        operand->host |= range->is_host();
        operand->sync_memops |= range->sync_memops.load();
        at = stop;
    }
    return success;
}

Result resolve(std::uint64_t address, std::uint64_t length_bytes, const Context& context, Side side, Use use,
               Operand* operand) {
    if (address == 0 || address + length_bytes < address) {
        return invalid_value;
    }
    if (find_range(address)) {
        return resolve_ranges(address, length_bytes, context, use, operand);
    }
    // Plain host memory may not run into registered memory, and a device address that is not allocated is none.
    if (side == Side::device_only || is_device_address(address) || !ranges_in(address, length_bytes).empty()) {
        return invalid_value;
    }
    operand->pieces.emplace_back(reinterpret_cast<std::byte*>(address), length_bytes);
    operand->pageable = operand->host = true;
    return success;
}

void move_bytes(const Operand& to, const Operand& from) {
    std::size_t source = 0, source_at = 0;
    for (const std::span<std::byte> target : to.pieces) {
        for (std::size_t at = 0; at < target.size();) {
            const std::span<std::byte> piece = from.pieces[source];
            const std::size_t count = std::min(target.size() - at, piece.size() - source_at);
            std::memmove(target.data() + at, piece.data() + source_at, count);
            at += count;
            source_at += count;
            if (source_at == piece.size()) {
                ++source;
                source_at = 0;
            }
        }
    }
}

// The driver has read pageable memory before it returns: take the bytes now.
void stage(Operand* operand) {
    std::size_t length_bytes = 0;
    for (const auto& piece : operand->pieces) {
        length_bytes += piece.size();
    }
    auto staged = std::make_shared<std::vector<std::byte>>();
    staged->reserve(length_bytes);
    for (const auto& piece : operand->pieces) {
        staged->insert(staged->end(), piece.begin(), piece.end());
    }
    operand->pieces.assign(1, std::span(*staged));
    operand->keep.assign(1, std::move(staged));
}

Result resolve_both(const ContextRef& context, const CopyRequest& request, Operand* to, Operand* from) {
    const Result result = resolve(request.to, request.length_bytes, *context, request.to_side, Use::write, to);
    return result != success
               ? result
               : resolve(request.from, request.length_bytes, *context, request.from_side, Use::read, from);
}

// A copy that CUDA calls synchronous: in the legacy stream. One between device memories returns before it is done,
// unless somebody asked otherwise.
Result copy_now(const ContextRef& context, const CopyRequest& request) {
    if (request.length_bytes == 0) {
        return success;
    }
    Operand to, from;
    if (const Result result = resolve_both(context, request, &to, &from); result != success) {
        return result;
    }
    const bool waits = to.host || from.host || to.sync_memops || from.sync_memops || synchronises_memops(*context);
    const MarkerRef marker = enqueue(
        legacy_stream(context), [to = std::move(to), from = std::move(from)] { move_bytes(to, from); },
        waits ? Lateness::at_once : Lateness::late);
    if (waits) {
        wait_for(marker);
    }
    return success;
}

} // namespace

Result copy_later(const ContextRef& context, const CopyRequest& request, Handle stream_handle) {
    StreamRef stream;
    if (const Result found = find_stream(stream_handle, context, &stream); found != success) {
        return found;
    }
    if (request.length_bytes == 0) {
        return success;
    }
    Operand to, from;
    if (const Result result = resolve_both(context, request, &to, &from); result != success) {
        return result;
    }
    const bool waits = to.pageable;
    if (from.pageable && !waits) {
        stage(&from);
    }
    const MarkerRef marker = enqueue(
        stream, [to = std::move(to), from = std::move(from)] { move_bytes(to, from); }, Lateness::late);
    if (waits) {
        wait_for(marker);
    }
    return success;
}

namespace {

// A value of `width` bytes, `count` times.
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
    for (const std::span<std::byte> piece : to.pieces) {
        for (std::byte& byte : piece) {
            byte = pattern[at++ % width_bytes];
        }
    }
}

enum class Waiting { when_asked, never };

// On the device, a fill returns before it is done, also the one that is not called asynchronous.
Result fill(const ContextRef& context, const Fill& request, Handle stream_handle, Waiting waiting) {
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
    if (const Result result = resolve(request.to, length_bytes, *context, Side::device_only, Use::write, &to);
        result != success) {
        return result;
    }
    const bool waits = waiting == Waiting::when_asked && (to.host || to.sync_memops || synchronises_memops(*context));
    const MarkerRef marker = enqueue(
        stream,
        [to = std::move(to), value = request.value, width = request.width_bytes] { fill_bytes(to, value, width); },
        Lateness::late);
    if (waits) {
        wait_for(marker);
    }
    return success;
}

Result copy_peer(const ContextRef& context, const CopyRequest& request, Handle to_context, Handle from_context) {
    ContextRef to, from;
    if (find_context(to_context, &to) != success || find_context(from_context, &from) != success) {
        return invalid_context;
    }
    // Such a copy comes after all work of both contexts.
    synchronise(to);
    synchronise(from);
    return copy_now(context, request);
}

std::uint64_t address_of(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemcpy(DevicePointer to, DevicePointer from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpy", [&](const ContextRef& context) {
        return copy_now(context, {to, from, length_bytes, Side::any, Side::any});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoD_v2(DevicePointer to, const void* from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyHtoD_v2", [&](const ContextRef& context) {
        return copy_now(context, {to, address_of(from), length_bytes, Side::device_only, Side::any});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoH_v2(void* to, DevicePointer from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyDtoH_v2", [&](const ContextRef& context) {
        return copy_now(context, {address_of(to), from, length_bytes, Side::any, Side::device_only});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoD_v2(DevicePointer to, DevicePointer from, std::size_t length_bytes) {
    return entry_in_context("cuMemcpyDtoD_v2", [&](const ContextRef& context) {
        return copy_now(context, {to, from, length_bytes, Side::device_only, Side::device_only});
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyPeer(DevicePointer to, Handle to_context, DevicePointer from, Handle from_context,
                                      std::size_t length_bytes) {
    return entry_in_context("cuMemcpyPeer", [&](const ContextRef& context) {
        return copy_peer(context, {to, from, length_bytes, Side::device_only, Side::device_only}, to_context,
                         from_context);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyAsync(DevicePointer to, DevicePointer from, std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyAsync", [&](const ContextRef& context) {
        return copy_later(context, {to, from, length_bytes, Side::any, Side::any}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t length_bytes,
                                              Handle stream) {
    return entry_in_context("cuMemcpyHtoDAsync_v2", [&](const ContextRef& context) {
        return copy_later(context, {to, address_of(from), length_bytes, Side::device_only, Side::any}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyDtoHAsync_v2", [&](const ContextRef& context) {
        return copy_later(context, {address_of(to), from, length_bytes, Side::any, Side::device_only}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t length_bytes,
                                              Handle stream) {
    return entry_in_context("cuMemcpyDtoDAsync_v2", [&](const ContextRef& context) {
        return copy_later(context, {to, from, length_bytes, Side::device_only, Side::device_only}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyPeerAsync(DevicePointer to, Handle to_context, DevicePointer from, Handle from_context,
                                           std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemcpyPeerAsync", [&](const ContextRef& context) {
        ContextRef found;
        if (find_context(to_context, &found) != success || find_context(from_context, &found) != success) {
            return invalid_context;
        }
        return copy_later(context, {to, from, length_bytes, Side::device_only, Side::device_only}, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD8_v2(DevicePointer to, unsigned char value, std::size_t count) {
    return entry_in_context("cuMemsetD8_v2", [&](const ContextRef& context) {
        return fill(context, {to, value, 1, count}, stream_legacy, Waiting::when_asked);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD16_v2(DevicePointer to, unsigned short value, std::size_t count) {
    return entry_in_context("cuMemsetD16_v2", [&](const ContextRef& context) {
        return fill(context, {to, value, 2, count}, stream_legacy, Waiting::when_asked);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD32_v2(DevicePointer to, unsigned value, std::size_t count) {
    return entry_in_context("cuMemsetD32_v2", [&](const ContextRef& context) {
        return fill(context, {to, value, 4, count}, stream_legacy, Waiting::when_asked);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD8Async(DevicePointer to, unsigned char value, std::size_t count, Handle stream) {
    return entry_in_context("cuMemsetD8Async", [&](const ContextRef& context) {
        return fill(context, {to, value, 1, count}, stream, Waiting::never);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD16Async(DevicePointer to, unsigned short value, std::size_t count, Handle stream) {
    return entry_in_context("cuMemsetD16Async", [&](const ContextRef& context) {
        return fill(context, {to, value, 2, count}, stream, Waiting::never);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemsetD32Async(DevicePointer to, unsigned value, std::size_t count, Handle stream) {
    return entry_in_context("cuMemsetD32Async", [&](const ContextRef& context) {
        return fill(context, {to, value, 4, count}, stream, Waiting::never);
    });
}

} // namespace gdrkit::twin::cuda
