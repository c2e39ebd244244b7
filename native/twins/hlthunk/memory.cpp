// Allocates, maps, unmaps and frees the memory of a Gaudi, and maps host memory, by the rules of the kernel driver
// (memory.c).
#include <bit>

#include "hlthunk/device.hpp"
#include "hlthunk/entry.hpp"
#include "model/host_pages.hpp"
#include "model/ledger.hpp"
#include "model/trace.hpp"

namespace gdrkit::twin::gaudi {
namespace {

// A page of order n has 2^n bytes, so these are pages of 2 MiB to 1 GiB.
constexpr unsigned smallest_page_order = 21, largest_page_order = 30;

// Convert a value for the formats %llu and %#llx of trace().
unsigned long long to_ull(std::uint64_t value) {
    return value;
}

// Return the handle under which the ledger knows an object of this device. `handle` is unique in the device only.
std::uint64_t get_ledger_id(const Device& device, std::uint64_t handle) {
    return reinterpret_cast<std::uint64_t>(&device) ^ handle;
}

// Find the device for a call on its memory. Return 0, the error of find_device, or EBUSY after a device reset.
int get_operational_device(int fd, DeviceRef* device) {
    int error = 0;
    *device = find_device(fd, &error);
    if (*device == nullptr) {
        return error;
    }
    std::lock_guard lock((*device)->mutex);
    return (*device)->is_operational ? 0 : EBUSY;
}

std::uint64_t round_up_from_base(std::uint64_t base, std::uint64_t address, std::uint64_t alignment) {
    return base + round_up(address - base, alignment);
}

// Return the lowest address in [base, end) with `length_bytes` free bytes, or 0 if there is none. The address is `base`
// plus a multiple of `alignment`. The lowest gap is chosen, so that a freed address is soon used again. `used_ranges`
// maps the start of each used range to a value; `length_of` computes the length of the range from this map entry.
template <typename Ranges>
std::uint64_t find_lowest_gap(const Ranges& used_ranges, std::uint64_t base, std::uint64_t end,
                              std::uint64_t length_bytes, std::uint64_t alignment, auto&& length_of) {
    std::uint64_t candidate = base;
    for (auto next = used_ranges.lower_bound(base); next != used_ranges.end() && next->first < end; ++next) {
        if (next->first >= candidate && next->first - candidate >= length_bytes) {
            break;
        }
        candidate = round_up_from_base(base, next->first + length_of(*next), alignment);
    }
    return candidate < end && end - candidate >= length_bytes ? candidate : 0;
}

// Store the page size for an allocation in *page_bytes: the requested size, or the default if 0 is requested. Return
// EINVAL if the requested size is not supported.
int choose_page_size(std::uint64_t requested_page_bytes, std::uint64_t* page_bytes) {
    if (requested_page_bytes == 0) {
        *page_bytes = generation_properties().default_page_bytes;
        return 0;
    }
    const bool is_supported = std::has_single_bit(requested_page_bytes) &&
                              requested_page_bytes >= std::uint64_t{1} << smallest_page_order &&
                              requested_page_bytes <= std::uint64_t{1} << largest_page_order;
    *page_bytes = requested_page_bytes;
    return is_supported ? 0 : EINVAL;
}

int allocate(Device* device, std::uint64_t size_bytes, std::uint64_t requested_page_bytes, bool is_shared,
             std::uint64_t* handle) {
    if (size_bytes == 0) {
        return EINVAL;
    }
    if (!generation_properties().has_virtual_memory) {
        *handle = 0; // On the first Gaudi the driver allocates nothing: the program manages the memory.
        return 0;
    }
    auto allocation = std::make_shared<Allocation>();
    if (const int error = choose_page_size(requested_page_bytes, &allocation->page_bytes); error != 0) {
        return error;
    }
    const Properties& device_properties = generation_properties();
    if (size_bytes > device_properties.dram_bytes) {
        return ENOMEM;
    }
    allocation->total_bytes = round_up(size_bytes, allocation->page_bytes);
    std::lock_guard lock(device->mutex);
    allocation->physical_address = find_lowest_gap(
        device->allocated_ranges, device_properties.dram_user_base, device_properties.dram_end(),
        allocation->total_bytes, allocation->page_bytes, [](const auto& range) { return range.second; });
    allocation->memfd = Fd(allocation->physical_address == 0 ? -1 : make_device_memory(allocation->total_bytes));
    if (!allocation->memfd) {
        return ENOMEM;
    }
    allocation->is_shared = is_shared;
    allocation->handle = *handle = ++device->last_allocation_handle;
    device->allocated_ranges.emplace(allocation->physical_address, allocation->total_bytes);
    record_open_handle("gaudi_memory", get_ledger_id(*device, allocation->handle));
    device->allocations.emplace(allocation->handle, std::move(allocation));
    return 0;
}

// Free an allocation. Like the driver, use only the lower 32 bits of the handle.
int free_allocation(Device* device, std::uint64_t handle) {
    if (!generation_properties().has_virtual_memory) {
        return 0;
    }
    std::lock_guard lock(device->mutex);
    const auto allocation_entry = device->allocations.find(handle & UINT32_MAX);
    if (allocation_entry == device->allocations.end() || allocation_entry->second->mapping_count > 0) {
        return EINVAL;
    }
    device->allocated_ranges.erase(allocation_entry->second->physical_address);
    static_cast<void>(record_closed_handle("gaudi_memory", get_ledger_id(*device, allocation_entry->first)));
    device->allocations.erase(allocation_entry);
    return 0;
}

// Return the size of a mapping in whole host pages, in bytes. `mapping_entry` is an element of Device::mappings.
std::uint64_t count_mapped_bytes(const auto& mapping_entry) {
    return round_up(mapping_entry.second.length_bytes + mapping_entry.first % host_page_bytes, host_page_bytes);
}

// Return whether no mapping of the device overlaps this range of device addresses.
bool is_range_free(const Device& device, std::uint64_t begin, std::uint64_t length_bytes) {
    auto next = device.mappings.lower_bound(begin);
    if (next != device.mappings.end() && next->first - begin < length_bytes) {
        return false;
    }
    return next == device.mappings.begin() || std::prev(next)->first + count_mapped_bytes(*std::prev(next)) <= begin;
}

// Map an allocation, at the device address `hint_address` if it is usable. Store the device address in *address.
int map_allocation(Device* device, std::uint64_t handle, std::uint64_t hint_address, std::uint64_t* address) {
    std::lock_guard lock(device->mutex);
    const auto allocation_entry = device->allocations.find(handle & UINT32_MAX);
    if (allocation_entry == device->allocations.end()) {
        return EINVAL;
    }
    const std::shared_ptr<Allocation>& allocation = allocation_entry->second;
    const Properties& device_properties = generation_properties();
    // The range of device addresses is larger than the memory, because an allocation can be mapped several times.
    const std::uint64_t base = device_properties.dram_virtual_base, end = base + 16 * device_properties.dram_bytes;
    const bool is_hint_usable =
        hint_address >= base && hint_address < end && (hint_address - base) % allocation->page_bytes == 0 &&
        allocation->total_bytes <= end - hint_address && is_range_free(*device, hint_address, allocation->total_bytes);
    *address = is_hint_usable
                   ? hint_address
                   : find_lowest_gap(device->mappings, base, end, allocation->total_bytes, allocation->page_bytes,
                                     [](const auto& mapping_entry) { return count_mapped_bytes(mapping_entry); });
    if (*address == 0) {
        return ENOMEM;
    }
    ++allocation->mapping_count;
    device->mappings.emplace(*address, Mapping{allocation, 0, allocation->total_bytes, {}});
    record_open_handle("gaudi_mapping", get_ledger_id(*device, *address));
    return 0;
}

// Check whether the driver could pin host memory for writing. Return 0, or EFAULT if a page is not mapped or not
// writable.
int check_can_pin(std::uint64_t begin, std::uint64_t length_bytes) {
    const std::uint64_t first_page_address = begin / host_page_bytes * host_page_bytes;
    const std::uint64_t end = round_up(begin + length_bytes, host_page_bytes);
    return check_mapped(first_page_address, end, true);
}

// Map host memory. Store the device address in *address.
int map_host(Device* device, std::uint64_t host_address, std::uint64_t size_bytes, std::uint64_t* address) {
    if (size_bytes == 0 || host_address + size_bytes < host_address) {
        return EINVAL;
    }
    if (const int error = check_can_pin(host_address, size_bytes); error != 0) {
        return error;
    }
    const std::uint64_t base = generation_properties().host_virtual_base, page_offset = host_address % host_page_bytes;
    std::lock_guard lock(device->mutex);
    // The range of device addresses is as large as the address space of an x86-64 process (2^47 bytes).
    const std::uint64_t page_address = find_lowest_gap(
        device->mappings, base, base + (std::uint64_t{1} << 47), round_up(size_bytes + page_offset, host_page_bytes),
        host_page_bytes, [](const auto& mapping_entry) { return count_mapped_bytes(mapping_entry); });
    if (page_address == 0) {
        return ENOMEM;
    }
    *address = page_address + page_offset;
    device->mappings.emplace(*address, Mapping{nullptr, host_address, size_bytes, {}});
    record_open_handle("gaudi_host_mapping", get_ledger_id(*device, *address));
    return 0;
}

int unmap(Device* device, std::uint64_t address) {
    std::lock_guard lock(device->mutex);
    const auto mapping_entry = device->mappings.find(address);
    if (mapping_entry == device->mappings.end()) {
        return EINVAL;
    }
    Mapping& mapping = mapping_entry->second;
    std::erase_if(mapping.dmabuf_ids, [](std::uint64_t id) { return !is_dmabuf_alive(id); });
    if (!mapping.dmabuf_ids.empty()) {
        return EINVAL; // a dma-buf that was exported from this mapping is alive
    }
    if (mapping.allocation) {
        --mapping.allocation->mapping_count;
    }
    static_cast<void>(record_closed_handle(mapping.allocation ? "gaudi_mapping" : "gaudi_host_mapping",
                                           get_ledger_id(*device, address)));
    device->mappings.erase(mapping_entry);
    return 0;
}

} // namespace

// `contiguous` has no effect, because an allocation of the twin is always physically contiguous.
GDRKIT_HLTHUNK_ENTRY std::uint64_t hlthunk_device_memory_alloc(int fd, std::uint64_t size_bytes,
                                                               std::uint64_t page_size, bool contiguous, bool shared) {
    const std::uint64_t handle = run_u64_entry("hlthunk_device_memory_alloc", [&](std::uint64_t* new_handle) {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : allocate(device.get(), size_bytes, page_size, shared, new_handle);
    });
    trace("hlthunk_device_memory_alloc fd=%d size=%llu page_size=%llu contiguous=%d shared=%d -> %#llx", fd,
          to_ull(size_bytes), to_ull(page_size), contiguous, shared, to_ull(handle));
    return handle;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_device_memory_free(int fd, std::uint64_t handle) {
    const int result = run_entry("hlthunk_device_memory_free", [&] {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : free_allocation(device.get(), handle);
    });
    trace("hlthunk_device_memory_free fd=%d handle=%#llx -> %d", fd, to_ull(handle), result);
    return result;
}

GDRKIT_HLTHUNK_ENTRY std::uint64_t hlthunk_device_memory_map(int fd, std::uint64_t handle, std::uint64_t hint_address) {
    const std::uint64_t address = run_u64_entry("hlthunk_device_memory_map", [&](std::uint64_t* new_address) {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : map_allocation(device.get(), handle, hint_address, new_address);
    });
    trace("hlthunk_device_memory_map fd=%d handle=%#llx hint_addr=%#llx -> %#llx", fd, to_ull(handle),
          to_ull(hint_address), to_ull(address));
    return address;
}

GDRKIT_HLTHUNK_ENTRY std::uint64_t hlthunk_host_memory_map_flags(int fd, void* host, std::uint64_t /*hint*/,
                                                                 std::uint64_t size_bytes, std::uint32_t /*flags*/) {
    return run_u64_entry("hlthunk_host_memory_map_flags", [&](std::uint64_t* address) {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : map_host(device.get(), reinterpret_cast<std::uint64_t>(host), size_bytes, address);
    });
}

GDRKIT_HLTHUNK_ENTRY std::uint64_t hlthunk_host_memory_map(int fd, void* host, std::uint64_t /*hint*/,
                                                           std::uint64_t size_bytes) {
    return run_u64_entry("hlthunk_host_memory_map", [&](std::uint64_t* address) {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : map_host(device.get(), reinterpret_cast<std::uint64_t>(host), size_bytes, address);
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_memory_unmap(int fd, std::uint64_t address) {
    const int result = run_entry("hlthunk_memory_unmap", [&] {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : unmap(device.get(), address);
    });
    trace("hlthunk_memory_unmap fd=%d device_virt_addr=%#llx -> %d", fd, to_ull(address), result);
    return result;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_dram_usage(int fd, DramUsage* usage) {
    return run_entry("hlthunk_get_dram_usage", [&] {
        int error = 0;
        const DeviceRef device = usage == nullptr ? nullptr : find_device(fd, &error);
        if (!device) {
            return usage == nullptr ? EINVAL : error;
        }
        std::lock_guard lock(device->mutex);
        std::uint64_t used_bytes = 0;
        for (const auto& [physical_address, length_bytes] : device->allocated_ranges) {
            used_bytes += length_bytes;
        }
        *usage = {generation_properties().dram_end() - generation_properties().dram_user_base - used_bytes, used_bytes};
        return 0;
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_dev_memalloc_page_orders(int fd, std::uint64_t* order_mask) {
    return run_entry("hlthunk_get_dev_memalloc_page_orders", [&] {
        unsigned index = 0;
        int error = 0;
        if (order_mask == nullptr) {
            return EINVAL;
        }
        if (!find_device_index(fd, &index, &error)) {
            return error;
        }
        *order_mask = 0;
        for (unsigned order = smallest_page_order;
             generation_properties().has_virtual_memory && order <= largest_page_order; ++order) {
            *order_mask |= std::uint64_t{1} << order;
        }
        return 0;
    });
}

} // namespace gdrkit::twin::gaudi
