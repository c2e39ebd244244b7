// The software twin of libcuda: cuMemAlloc, cuMemAllocPitch, cuMemAllocManaged, cuMemFree and queries of device memory.
#include <sys/mman.h>

#include <algorithm>

#include "cuda/capture.hpp"
#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/pool.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

constexpr std::size_t pitch_alignment_bytes = 512;

Result allocate_in_context(const ContextRef& context, DevicePointer* pointer, std::uint64_t length_bytes) {
    if (pointer == nullptr || length_bytes == 0) {
        return invalid_value;
    }
    if (const Result result = check_captures_permit_call(); result != success) {
        return result;
    }
    RangeRef range;
    const Result allocate_result = allocate(MemoryKind::device, context->device, length_bytes, &range);
    if (allocate_result != success) {
        return allocate_result;
    }
    range->context = context->owning_context_handle;
    range->gpu_direct_rdma_capable = true;
    add_range(range);
    *pointer = range->base;
    return success;
}

// Wait for queued work that may still use the memory. As in CUDA, cuMemFree of memory from a pool (cuMemAllocAsync)
// does not wait: the program must ensure that all accesses have completed.
void wait_for_queued_work(const Range& range, const ContextRef& current_context) {
    if (range.kind == MemoryKind::pool) {
        return;
    }
    ContextRef owning_context;
    if (find_context(range.context, &owning_context) == success) {
        synchronise(owning_context);
    }
    synchronise(current_context);
}

} // namespace

Result allocate(MemoryKind kind, Device device, std::uint64_t length_bytes, RangeRef* allocated_range) {
    if (length_bytes > device_capacity_bytes) {
        return out_of_memory;
    }
    // The addresses of the allocation, see arena.hpp.
    const AddressSlot slot = allocate_address_slot(length_bytes);
    if (slot.base == 0) {
        return out_of_memory;
    }
    const Result result = make_range(kind, device, length_bytes, slot, allocated_range);
    if (result != success) {
        free_address_slot(slot);
    }
    return result;
}

Result make_range(MemoryKind kind, Device device, std::uint64_t length_bytes, const AddressSlot& slot,
                  RangeRef* new_range) {
    auto range = std::make_shared<Range>();
    const Result result = Memory::make(device, slot.get_page_offset_bytes() + length_bytes, &range->memory);
    if (result != success) {
        return result;
    }
    range->kind = kind;
    range->base = slot.base;
    range->slot = slot;
    range->memory_offset = slot.get_page_offset_bytes();
    range->length_bytes = length_bytes;
    range->buffer_id = make_buffer_id();
    range->device = device;
    *new_range = std::move(range);
    return success;
}

GDRKIT_CUDA_ENTRY Result cuMemAlloc_v2(DevicePointer* pointer, std::size_t length_bytes) {
    return run_entry_in_context("cuMemAlloc_v2", [&](const ContextRef& context) {
        return allocate_in_context(context, pointer, length_bytes);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAllocPitch_v2(DevicePointer* pointer, std::size_t* pitch_bytes, std::size_t width_bytes,
                                            std::size_t height, unsigned element_bytes) {
    return run_entry_in_context("cuMemAllocPitch_v2", [&](const ContextRef& context) {
        const bool is_valid_element = element_bytes == 4 || element_bytes == 8 || element_bytes == 16;
        if (pitch_bytes == nullptr || !is_valid_element || width_bytes == 0 || height == 0) {
            return invalid_value;
        }
        std::uint64_t length_bytes = 0;
        const std::size_t row_bytes = round_up(width_bytes, pitch_alignment_bytes);
        if (row_bytes < width_bytes || __builtin_mul_overflow(row_bytes, height, &length_bytes)) {
            return out_of_memory;
        }
        const Result result = allocate_in_context(context, pointer, length_bytes);
        if (result == success) {
            *pitch_bytes = row_bytes;
        }
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAllocManaged(DevicePointer* pointer, std::size_t length_bytes, unsigned flags) {
    return run_entry_in_context("cuMemAllocManaged", [&](const ContextRef& context) {
        if (pointer == nullptr || length_bytes == 0 || (flags != attach_global && flags != attach_host)) {
            return invalid_value;
        }
        if (const Result result = check_captures_permit_call(); result != success) {
            return result;
        }
        const RangeRef range = make_host_range(MemoryKind::managed, length_bytes);
        if (!range) {
            return out_of_memory;
        }
        range->context = context->owning_context_handle;
        range->device = context->device;
        range->sync_memops = true;
        add_range(range);
        *pointer = range->base;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemFree_v2(DevicePointer pointer) {
    return run_entry_in_context("cuMemFree_v2", [&](const ContextRef& context) {
        if (const Result result = check_captures_permit_call(); result != success) {
            return result;
        }
        if (pointer == 0) {
            return success;
        }
        if (const RangeRef range = find_range_by_base(pointer)) {
            wait_for_queued_work(*range, context);
        }
        RangeRef range;
        const Result result =
            remove_range(pointer, {MemoryKind::device, MemoryKind::pool, MemoryKind::managed}, &range);
        if (result != success) {
            return result;
        }
        if (range->pool != 0) {
            record_pool_free(range->pool, range->length_bytes);
        }
        if (range->slot.base != 0) {
            free_address_slot(range->slot);
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
    return run_entry_in_context("cuMemGetInfo_v2", [&](const ContextRef& context) {
        if (free_bytes == nullptr || total_bytes == nullptr) {
            return invalid_value;
        }
        *free_bytes = count_free_bytes(context->device);
        *total_bytes = device_capacity_bytes;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemGetAddressRange_v2(DevicePointer* base, std::size_t* length_bytes,
                                                 DevicePointer pointer) {
    return run_entry_in_context("cuMemGetAddressRange_v2", [&](const ContextRef&) {
        const RangeRef range = find_range(pointer);
        if (!range) {
            return not_found;
        }
        if (base != nullptr) {
            *base = range->base;
        }
        if (length_bytes != nullptr) {
            *length_bytes = range->length_bytes;
        }
        return success;
    });
}

} // namespace gdrkit::twin::cuda
