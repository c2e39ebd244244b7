// Virtual memory management: cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess, and sharing of memory by file
// descriptors.

#include "cuda/vmm.hpp"

#include <sys/stat.h>

#include <bit>
#include <cerrno>
#include <map>
#include <mutex>
#include <span>

#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/registry.hpp"
#include "model/dmabuf.hpp"

namespace gdrkit::twin::cuda {
namespace {

// A physical allocation. cuMemCreate, an import and cuMemRetainAllocationHandle each add one reference to its handle.
// Mappings keep the memory alive after the handle is released.
struct Allocation {
    Handle handle = 0;
    MemoryRef memory;
    AllocationProperties properties{};
    std::uint64_t reference_count = 1; // guarded by the mutex of Vmm
};
using AllocationRef = std::shared_ptr<Allocation>;

// An address range that cuMemAddressReserve has reserved.
struct Reservation {
    std::uint64_t base = 0, length_bytes = 0;
};

struct Vmm {
    std::mutex mutex;                                  // serializes mapping, unmapping, reserving and releasing
    std::map<std::uint64_t, Reservation> reservations; // key: base
    Registry<Allocation> allocations{"cuda_vmm_allocation"};
    // The same reservations in the ledger of live handles, which detects double releases.
    Registry<Reservation> reservation_ledger{"cuda_vmm_reservation"};
};

Vmm& vmm() {
    static auto* const instance = new Vmm;
    return *instance;
}

bool is_granularity_multiple(std::uint64_t value) {
    return value % vmm_granularity_bytes == 0;
}

// Return the reservation that contains the whole range, or null.
const Reservation* find_containing_reservation(const Vmm& vmm_table, std::uint64_t address,
                                               std::uint64_t length_bytes) {
    const auto next_reservation = vmm_table.reservations.upper_bound(address);
    if (next_reservation == vmm_table.reservations.begin() || length_bytes == 0) {
        return nullptr;
    }
    const Reservation& reservation = std::prev(next_reservation)->second;
    const std::uint64_t offset = address - reservation.base;
    return offset < reservation.length_bytes && length_bytes <= reservation.length_bytes - offset ? &reservation
                                                                                                  : nullptr;
}

// Find the mappings in [address, address + length_bytes). Return false if a mapping extends beyond this range. With
// `require_full_coverage`, also return false if a part of the range is not mapped.
bool find_whole_mappings(std::uint64_t address, std::uint64_t length_bytes, bool require_full_coverage,
                         std::vector<RangeRef>* mappings) {
    *mappings = list_ranges(address, length_bytes);
    std::uint64_t covered_bytes = 0;
    for (const RangeRef& range : *mappings) {
        if (range->base < address || range->base + range->length_bytes > address + length_bytes) {
            return false;
        }
        covered_bytes += range->length_bytes;
    }
    return !require_full_coverage || covered_bytes == length_bytes;
}

Result check_properties(const AllocationProperties* properties) {
    if (properties == nullptr || properties->type != allocation_pinned) {
        return invalid_value;
    }
    const bool is_on_device = properties->location.type == location_device;
    const bool has_valid_handle_types = (properties->requested_handle_types & ~handle_posix_fd) == 0;
    if (!is_on_device || !has_valid_handle_types || properties->usage != 0) {
        return not_supported;
    }
    return device_exists(properties->location.id) ? success : invalid_device;
}

Handle add_allocation_locked(Vmm* vmm_table, MemoryRef memory, const AllocationProperties& properties) {
    auto allocation = std::make_shared<Allocation>();
    allocation->handle = make_handle();
    allocation->memory = std::move(memory);
    allocation->properties = properties;
    vmm_table->allocations.add(allocation->handle, allocation);
    return allocation->handle;
}

Result map_locked(Vmm* vmm_table, std::uint64_t address, std::uint64_t length_bytes, const AllocationRef& allocation) {
    const Reservation* const reservation = find_containing_reservation(*vmm_table, address, length_bytes);
    if (reservation == nullptr || !is_granularity_multiple(address) || !is_granularity_multiple(length_bytes)) {
        return invalid_value;
    }
    // The twin maps only whole allocations.
    if (length_bytes != allocation->memory->length_bytes()) {
        return not_supported;
    }
    auto range = std::make_shared<Range>();
    range->kind = MemoryKind::vmm;
    range->base = address;
    range->length_bytes = length_bytes;
    range->buffer_id = make_buffer_id();
    range->device = allocation->memory->device();
    range->memory = allocation->memory;
    range->handle_types = static_cast<std::uint32_t>(allocation->properties.requested_handle_types);
    range->gpu_direct_rdma_capable = allocation->properties.gpu_direct_rdma_capable != 0;
    range->reservation_base = reservation->base;
    range->reservation_bytes = reservation->length_bytes;
    // The range keeps the allocation alive, so that cuMemRetainAllocationHandle works after the handle was released.
    range->owning_object = allocation;
    return add_range_unless_overlapping(range) ? success : invalid_value;
}

} // namespace

bool find_reservation(std::uint64_t address, std::uint64_t* base, std::uint64_t* length_bytes) {
    Vmm& vmm_table = vmm();
    std::lock_guard lock(vmm_table.mutex);
    const Reservation* const reservation = find_containing_reservation(vmm_table, address, 1);
    if (reservation != nullptr) {
        *base = reservation->base;
        *length_bytes = reservation->length_bytes;
    }
    return reservation != nullptr;
}

// ---- addresses

GDRKIT_CUDA_ENTRY Result cuMemAddressReserve(DevicePointer* pointer, std::size_t length_bytes,
                                             std::size_t alignment_bytes, DevicePointer, unsigned long long flags) {
    return run_entry_in_context("cuMemAddressReserve", [&](const ContextRef&) {
        if (pointer == nullptr || length_bytes == 0 || !is_granularity_multiple(length_bytes) || flags != 0 ||
            (alignment_bytes != 0 && !std::has_single_bit(alignment_bytes))) {
            return invalid_value;
        }
        const std::uint64_t base = reserve_addresses(length_bytes, alignment_bytes);
        if (base == 0) {
            return out_of_memory;
        }
        Vmm& vmm_table = vmm();
        std::lock_guard lock(vmm_table.mutex);
        vmm_table.reservations[base] = {base, length_bytes};
        vmm_table.reservation_ledger.add(base, std::make_shared<Reservation>(base, length_bytes));
        *pointer = base;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAddressFree(DevicePointer pointer, std::size_t length_bytes) {
    return run_entry_in_context("cuMemAddressFree", [&](const ContextRef&) {
        Vmm& vmm_table = vmm();
        std::lock_guard lock(vmm_table.mutex);
        const auto entry = vmm_table.reservations.find(pointer);
        if (entry != vmm_table.reservations.end() &&
            (entry->second.length_bytes != length_bytes || !list_ranges(pointer, length_bytes).empty())) {
            return invalid_value;
        }
        if (!vmm_table.reservation_ledger.take(pointer)) {
            return invalid_value;
        }
        vmm_table.reservations.erase(pointer);
        free_addresses(pointer, length_bytes);
        return success;
    });
}

// ---- physical allocations

GDRKIT_CUDA_ENTRY Result cuMemGetAllocationGranularity(std::size_t* granularity_bytes,
                                                       const AllocationProperties* properties, int option) {
    return run_entry("cuMemGetAllocationGranularity", [&] {
        if (granularity_bytes == nullptr || (option != granularity_minimum && option != granularity_recommended)) {
            return invalid_value;
        }
        const Result result = check_properties(properties);
        if (result == success) {
            *granularity_bytes = vmm_granularity_bytes;
        }
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemCreate(Handle* handle, std::size_t length_bytes, const AllocationProperties* properties,
                                     unsigned long long flags) {
    return run_entry_in_context("cuMemCreate", [&](const ContextRef&) {
        if (handle == nullptr || length_bytes == 0 || !is_granularity_multiple(length_bytes) || flags != 0) {
            return invalid_value;
        }
        if (const Result result = check_properties(properties); result != success) {
            return result;
        }
        MemoryRef memory;
        if (const Result result = Memory::make(properties->location.id, length_bytes, &memory); result != success) {
            return result;
        }
        Vmm& vmm_table = vmm();
        std::lock_guard lock(vmm_table.mutex);
        *handle = add_allocation_locked(&vmm_table, std::move(memory), *properties);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemRelease(Handle handle) {
    return run_entry("cuMemRelease", [&] {
        Vmm& vmm_table = vmm();
        // This variable is declared before the lock, so that the memory is freed after the unlock.
        AllocationRef released_allocation;
        std::lock_guard lock(vmm_table.mutex);
        if (const AllocationRef allocation = vmm_table.allocations.find(handle);
            allocation && allocation->reference_count > 1) {
            --allocation->reference_count;
            return success;
        }
        released_allocation = vmm_table.allocations.take(handle);
        return released_allocation ? success : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemRetainAllocationHandle(Handle* handle, void* pointer) {
    return run_entry("cuMemRetainAllocationHandle", [&] {
        const RangeRef range = find_range(reinterpret_cast<std::uint64_t>(pointer));
        if (handle == nullptr || !range || range->kind != MemoryKind::vmm) {
            return invalid_value;
        }
        const auto allocation = std::static_pointer_cast<Allocation>(range->owning_object);
        Vmm& vmm_table = vmm();
        std::lock_guard lock(vmm_table.mutex);
        if (vmm_table.allocations.find(allocation->handle)) {
            ++allocation->reference_count;
        } else {
            // The program has released the handle. The handle becomes valid again.
            allocation->reference_count = 1;
            vmm_table.allocations.add(allocation->handle, allocation);
        }
        *handle = allocation->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemGetAllocationPropertiesFromHandle(AllocationProperties* properties, Handle handle) {
    return run_entry("cuMemGetAllocationPropertiesFromHandle", [&] {
        const AllocationRef allocation = vmm().allocations.find(handle);
        if (properties == nullptr || !allocation) {
            return invalid_value;
        }
        *properties = allocation->properties;
        return success;
    });
}

// ---- mappings

GDRKIT_CUDA_ENTRY Result cuMemMap(DevicePointer pointer, std::size_t length_bytes, std::size_t offset_bytes,
                                  Handle handle, unsigned long long flags) {
    return run_entry_in_context("cuMemMap", [&](const ContextRef&) {
        Vmm& vmm_table = vmm();
        std::lock_guard lock(vmm_table.mutex);
        const AllocationRef allocation = vmm_table.allocations.find(handle);
        if (!allocation || flags != 0) {
            return invalid_value;
        }
        return offset_bytes == 0 ? map_locked(&vmm_table, pointer, length_bytes, allocation) : not_supported;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemUnmap(DevicePointer pointer, std::size_t length_bytes) {
    return run_entry_in_context("cuMemUnmap", [&](const ContextRef&) {
        std::vector<RangeRef> mappings; // declared before the lock, so that their memory is freed after the unlock
        Vmm& vmm_table = vmm();
        std::lock_guard lock(vmm_table.mutex);
        // The range may include reserved addresses without a mapping.
        if (find_containing_reservation(vmm_table, pointer, length_bytes) == nullptr ||
            !find_whole_mappings(pointer, length_bytes, false, &mappings)) {
            return invalid_value;
        }
        for (const RangeRef& range : mappings) {
            RangeRef removed_range;
            if (const Result result = remove_range(range->base, {MemoryKind::vmm}, &removed_range); result != success) {
                return result;
            }
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemSetAccess(DevicePointer pointer, std::size_t length_bytes,
                                        const AccessDescription* descriptions, std::size_t count) {
    return run_entry_in_context("cuMemSetAccess", [&](const ContextRef&) {
        Vmm& vmm_table = vmm();
        std::lock_guard lock(vmm_table.mutex);
        std::vector<RangeRef> mappings;
        if (descriptions == nullptr || count == 0 ||
            find_containing_reservation(vmm_table, pointer, length_bytes) == nullptr ||
            !find_whole_mappings(pointer, length_bytes, true, &mappings)) {
            return invalid_value;
        }
        const std::span all_descriptions(descriptions, count);
        for (const AccessDescription& description : all_descriptions) {
            if (description.location.type == location_host) {
                return not_supported;
            }
            const bool has_valid_flags = description.flags == access_none || description.flags == access_read ||
                                         description.flags == access_read_write;
            if (description.location.type != location_device || !device_exists(description.location.id) ||
                !has_valid_flags) {
                return invalid_value;
            }
        }
        for (const AccessDescription& description : all_descriptions) {
            for (const RangeRef& range : mappings) {
                set_access(range, description.location.id, description.flags);
            }
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemGetAccess(unsigned long long* flags, const Location* location, DevicePointer pointer) {
    return run_entry_in_context("cuMemGetAccess", [&](const ContextRef&) {
        const RangeRef range = find_range(pointer);
        if (flags == nullptr || location == nullptr || location->type != location_device ||
            !device_exists(location->id) || !range || range->kind != MemoryKind::vmm) {
            return invalid_value;
        }
        *flags = static_cast<unsigned long long>(get_access(*range, location->id));
        return success;
    });
}

// ---- sharing between processes

GDRKIT_CUDA_ENTRY Result cuMemExportToShareableHandle(void* shareable_handle, Handle handle, int handle_type,
                                                      unsigned long long flags) {
    return run_entry("cuMemExportToShareableHandle", [&] {
        const AllocationRef allocation = vmm().allocations.find(handle);
        if (shareable_handle == nullptr || !allocation || flags != 0 || handle_type != handle_posix_fd ||
            (allocation->properties.requested_handle_types & handle_posix_fd) == 0) {
            return invalid_value;
        }
        const int fd = export_shareable_handle(allocation->memory->fd());
        if (fd < 0) {
            return operating_system_error;
        }
        *static_cast<int*>(shareable_handle) = fd;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemImportFromShareableHandle(Handle* handle, void* shareable_handle, int handle_type) {
    return run_entry_in_context("cuMemImportFromShareableHandle", [&](const ContextRef& context) {
        if (handle == nullptr || handle_type != handle_posix_fd) {
            return invalid_value;
        }
        const int memory_fd =
            import_shareable_handle(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable_handle)));
        if (memory_fd < 0) { // a negative errno
            return memory_fd == -EBADF ? unknown_error : invalid_value;
        }
        Fd fd(memory_fd);
        struct stat status {};
        if (fstat(fd.get(), &status) != 0 || !is_granularity_multiple(static_cast<std::uint64_t>(status.st_size))) {
            return invalid_value;
        }
        // A shareable handle does not identify the device of its memory, so the twin assumes the current device.
        MemoryRef memory;
        const auto length_bytes = static_cast<std::uint64_t>(status.st_size);
        const Result result = Memory::adopt(std::move(fd), length_bytes, context->device, &memory);
        if (result != success) {
            return result;
        }
        AllocationProperties properties{};
        properties.type = allocation_pinned;
        properties.location = {location_device, context->device};
        Vmm& vmm_table = vmm();
        std::lock_guard lock(vmm_table.mutex);
        *handle = add_allocation_locked(&vmm_table, std::move(memory), properties);
        return success;
    });
}

} // namespace gdrkit::twin::cuda
