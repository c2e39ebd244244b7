// cuPointerGetAttribute and related functions. They return the same values as on an H200, also for host memory, freed
// memory, and reserved addresses without a mapping.
#include <cstring>

#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "cuda/vmm.hpp"

namespace gdrkit::twin::cuda {
namespace {

template <typename Value> Result write_value(void* output, Value value) {
    std::memcpy(output, &value, sizeof value);
    return success;
}

// Return the access that the current context has to the range. Without a current context, return the access of the
// memory's device.
int get_access_of_current_context(const Range& range) {
    ContextRef context;
    return get_access(range, find_current_context(&context) == success ? context->device : range.device);
}

// Return the base of the page-aligned mapping that contains the range. count_mapping_bytes returns its size.
std::uint64_t find_mapping_base(const Range& range) {
    return range.memory ? range.base - range.memory_offset : range.base;
}
std::uint64_t count_mapping_bytes(const Range& range) {
    return range.memory ? range.memory->length_bytes() : round_up(range.length_bytes, page_bytes);
}

Result query_range(const Range& range, std::uint64_t pointer, int attribute, void* output) {
    const bool is_vmm = range.kind == MemoryKind::vmm;
    switch (attribute) {
    case pointer_context:
        return write_value<Handle>(output, range.context);
    case pointer_memory_type: {
        const bool is_host = range.is_host() && range.kind != MemoryKind::managed;
        return write_value<std::uint32_t>(output, is_host ? memory_host : memory_device);
    }
    case pointer_device_pointer:
        return write_value<std::uint64_t>(output, get_access_of_current_context(range) == access_none ? 0 : pointer);
    case pointer_host_pointer:
        write_value<std::uint64_t>(output, range.is_host() ? pointer : 0);
        return range.is_host() ? success : invalid_value;
    case pointer_sync_memops:
        return write_value<std::uint32_t>(output, range.sync_memops ? 1 : 0);
    case pointer_buffer_id:
    case pointer_memory_block_id:
        return write_value<std::uint64_t>(output, range.buffer_id);
    case pointer_is_managed:
        return write_value<std::uint32_t>(output, range.kind == MemoryKind::managed ? 1 : 0);
    case pointer_device_ordinal:
        return write_value<std::int32_t>(output, range.device);
    case pointer_is_legacy_ipc_capable:
        return write_value<std::uint32_t>(output, range.kind == MemoryKind::device ? 1 : 0);
    case pointer_range_start:
        return write_value<std::uint64_t>(output, is_vmm ? range.reservation_base : range.base);
    case pointer_range_size:
        return write_value<std::uint64_t>(output, is_vmm ? range.reservation_bytes : range.length_bytes);
    case pointer_mapped:
        return write_value<std::uint32_t>(output, 1);
    case pointer_allowed_handle_types:
        return write_value<std::uint64_t>(output, range.handle_types);
    case pointer_is_gpu_direct_rdma_capable:
        return write_value<std::uint32_t>(output, range.gpu_direct_rdma_capable ? 1 : 0);
    case pointer_access_flags:
        return write_value<std::uint32_t>(output, static_cast<std::uint32_t>(get_access_of_current_context(range)));
    case pointer_mempool_handle:
        return write_value<Handle>(output, range.pool);
    case pointer_mapping_size:
        return write_value<std::uint64_t>(output, count_mapping_bytes(range));
    case pointer_mapping_base:
        return write_value<std::uint64_t>(output, find_mapping_base(range));
    case pointer_is_hw_decompress_capable:
        return write_value<std::uint32_t>(output, 0);
    case pointer_p2p_tokens:
        return not_supported;
    default:
        return invalid_value;
    }
}

// Store the value that cuPointerGetAttributes returns for a pointer outside all ranges.
Result query_unknown_pointer(std::uint64_t pointer, int attribute, void* output) {
    std::uint64_t reservation_base = 0, reservation_bytes = 0;
    const bool is_reserved = find_reservation(pointer, &reservation_base, &reservation_bytes);
    switch (attribute) {
    case pointer_context:
    case pointer_device_pointer:
    case pointer_buffer_id:
    case pointer_allowed_handle_types:
    case pointer_mempool_handle:
    case pointer_mapping_size:
    case pointer_mapping_base:
    case pointer_memory_block_id:
        return write_value<std::uint64_t>(output, 0);
    case pointer_memory_type:
    case pointer_sync_memops:
    case pointer_is_managed:
    case pointer_is_legacy_ipc_capable:
    case pointer_mapped:
    case pointer_is_gpu_direct_rdma_capable:
    case pointer_access_flags:
    case pointer_is_hw_decompress_capable:
        return write_value<std::uint32_t>(output, 0);
    case pointer_host_pointer:
        return write_value<std::uint64_t>(output, is_device_address(pointer) && !is_reserved ? 0 : pointer);
    case pointer_device_ordinal:
        return write_value<std::int32_t>(output, invalid_device_ordinal);
    // Outside reservations, an H200 returns success and leaves the caller's variable unchanged.
    case pointer_range_start:
        return is_reserved ? write_value<std::uint64_t>(output, reservation_base) : success;
    case pointer_range_size:
        return is_reserved ? write_value<std::uint64_t>(output, reservation_bytes) : success;
    case pointer_p2p_tokens:
        return not_supported;
    default:
        return invalid_value;
    }
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuPointerGetAttribute(void* value, int attribute, DevicePointer pointer) {
    return run_entry("cuPointerGetAttribute", [&] {
        const RangeRef range = find_range(pointer);
        if (value == nullptr || !range) {
            return invalid_value;
        }
        return query_range(*range, pointer, attribute, value);
    });
}

GDRKIT_CUDA_ENTRY Result cuPointerGetAttributes(unsigned count, const int* attributes, void** values,
                                                DevicePointer pointer) {
    return run_entry("cuPointerGetAttributes", [&] {
        if (count == 0 || attributes == nullptr || values == nullptr) {
            return invalid_value;
        }
        const RangeRef range = find_range(pointer);
        for (unsigned index = 0; index < count; ++index) {
            void* const output = values[index];
            const int attribute = attributes[index];
            if (output == nullptr) {
                return invalid_value;
            }
            const Result status = range ? query_range(*range, pointer, attribute, output)
                                        : query_unknown_pointer(pointer, attribute, output);
            // For memory without a host address this function stores 0, whereas cuPointerGetAttribute fails.
            if (status != success && attribute != pointer_host_pointer) {
                return status;
            }
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuPointerSetAttribute(const void* value, int attribute, DevicePointer pointer) {
    return run_entry("cuPointerSetAttribute", [&] {
        const RangeRef range = find_range(pointer);
        if (value == nullptr || attribute != pointer_sync_memops || !range) {
            return invalid_value;
        }
        if (range->kind == MemoryKind::vmm) {
            return not_supported;
        }
        std::uint32_t is_enabled = 0;
        std::memcpy(&is_enabled, value, sizeof is_enabled);
        range->sync_memops = is_enabled != 0;
        return success;
    });
}

} // namespace gdrkit::twin::cuda
