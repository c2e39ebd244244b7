// What the driver says about a pointer. The answers for host, freed and merely reserved pointers are those of an H200.
#include <cstring>

#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "cuda/vmm.hpp"

namespace gdrkit::twin::cuda {
namespace {

template <typename Value> Result put(void* where, Value value) {
    std::memcpy(where, &value, sizeof value);
    return success;
}

// With what access the current context (without one: the device of the memory) sees the range.
int access_here(const Range& range) {
    ContextRef context;
    return access_of(range, current_context(&context) == success ? context->device : range.device);
}

// The whole pages that were mapped together for the range.
std::uint64_t mapping_base(const Range& range) {
    return range.memory ? range.base - range.memory_offset : range.base;
}
std::uint64_t mapping_bytes(const Range& range) {
    return range.memory ? range.memory->length_bytes() : round_up(range.length_bytes, page_bytes);
}

Result answer(const Range& range, std::uint64_t pointer, int attribute, void* where) {
    const bool vmm = range.kind == Kind::vmm;
    switch (attribute) {
    case pointer_context:
        return put<Handle>(where, range.context);
    case pointer_memory_type: {
        const bool host = range.kind == Kind::host_alloc || range.kind == Kind::host_registered;
        return put<std::uint32_t>(where, host ? memory_host : memory_device);
    }
    case pointer_device_pointer:
        return put<std::uint64_t>(where, access_here(range) == access_none ? 0 : pointer);
    case pointer_host_pointer:
        put<std::uint64_t>(where, range.is_host() ? pointer : 0);
        return range.is_host() ? success : invalid_value;
    case pointer_sync_memops:
        return put<std::uint32_t>(where, range.sync_memops ? 1 : 0);
    case pointer_buffer_id:
    case pointer_memory_block_id:
        return put<std::uint64_t>(where, range.buffer_id);
    case pointer_is_managed:
        return put<std::uint32_t>(where, range.kind == Kind::managed ? 1 : 0);
    case pointer_device_ordinal:
        return put<std::int32_t>(where, range.device);
    case pointer_is_legacy_ipc_capable:
        return put<std::uint32_t>(where, range.kind == Kind::device ? 1 : 0);
    case pointer_range_start:
        return put<std::uint64_t>(where, vmm ? range.reservation_base : range.base);
    case pointer_range_size:
        return put<std::uint64_t>(where, vmm ? range.reservation_bytes : range.length_bytes);
    case pointer_mapped:
        return put<std::uint32_t>(where, 1);
    case pointer_allowed_handle_types:
        return put<std::uint64_t>(where, range.handle_types);
    case pointer_is_gpu_direct_rdma_capable:
        return put<std::uint32_t>(where, range.gpu_direct_rdma_capable ? 1 : 0);
    case pointer_access_flags:
        return put<std::uint32_t>(where, static_cast<std::uint32_t>(access_here(range)));
    case pointer_mempool_handle:
        return put<Handle>(where, range.pool);
    case pointer_mapping_size:
        return put<std::uint64_t>(where, mapping_bytes(range));
    case pointer_mapping_base:
        return put<std::uint64_t>(where, mapping_base(range));
    case pointer_is_hw_decompress_capable:
        return put<std::uint32_t>(where, 0);
    case pointer_p2p_tokens:
        return not_supported;
    default:
        return invalid_value;
    }
}

// cuPointerGetAttributes of a pointer that no range holds.
Result answer_unknown(std::uint64_t pointer, int attribute, void* where) {
    std::uint64_t base = 0, length_bytes = 0;
    const bool reserved = find_reservation(pointer, &base, &length_bytes);
    switch (attribute) {
    case pointer_context:
    case pointer_device_pointer:
    case pointer_buffer_id:
    case pointer_allowed_handle_types:
    case pointer_mempool_handle:
    case pointer_mapping_size:
    case pointer_mapping_base:
    case pointer_memory_block_id:
        return put<std::uint64_t>(where, 0);
    case pointer_memory_type:
    case pointer_sync_memops:
    case pointer_is_managed:
    case pointer_is_legacy_ipc_capable:
    case pointer_mapped:
    case pointer_is_gpu_direct_rdma_capable:
    case pointer_access_flags:
    case pointer_is_hw_decompress_capable:
        return put<std::uint32_t>(where, 0);
    case pointer_host_pointer:
        return put<std::uint64_t>(where, is_device_address(pointer) && !reserved ? 0 : pointer);
    case pointer_device_ordinal:
        return put<std::int32_t>(where, invalid_device_ordinal);
    case pointer_range_start:
        return reserved ? put<std::uint64_t>(where, base) : success;
    case pointer_range_size:
        return reserved ? put<std::uint64_t>(where, length_bytes) : success;
    case pointer_p2p_tokens:
        return not_supported;
    default:
        return invalid_value;
    }
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuPointerGetAttribute(void* value, int attribute, DevicePointer pointer) {
    return entry("cuPointerGetAttribute", [&] {
        const RangeRef range = find_range(pointer);
        if (value == nullptr || !range) {
            return invalid_value;
        }
        return answer(*range, pointer, attribute, value);
    });
}

GDRKIT_CUDA_ENTRY Result cuPointerGetAttributes(unsigned count, const int* attributes, void** values,
                                                DevicePointer pointer) {
    return entry("cuPointerGetAttributes", [&] {
        if (count == 0 || attributes == nullptr || values == nullptr) {
            return invalid_value;
        }
        const RangeRef range = find_range(pointer);
        for (unsigned index = 0; index < count; ++index) {
            void* const where = values[index];
            const int attribute = attributes[index];
            if (where == nullptr) {
                return invalid_value;
            }
            const Result result =
                range ? answer(*range, pointer, attribute, where) : answer_unknown(pointer, attribute, where);
            // Memory that has no host address says 0 here, where the single question is refused.
            if (result != success && attribute != pointer_host_pointer) {
                return result;
            }
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuPointerSetAttribute(const void* value, int attribute, DevicePointer pointer) {
    return entry("cuPointerSetAttribute", [&] {
        const RangeRef range = find_range(pointer);
        if (value == nullptr || attribute != pointer_sync_memops || !range) {
            return invalid_value;
        }
        if (range->kind == Kind::vmm) {
            return not_supported;
        }
        std::uint32_t on = 0;
        std::memcpy(&on, value, sizeof on);
        range->sync_memops = on != 0;
        return success;
    });
}

} // namespace gdrkit::twin::cuda
