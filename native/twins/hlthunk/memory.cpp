// Device memory: allocating, mapping, unmapping and freeing by the rules of the kernel driver (memory.c).
#include <bit>

#include "hlthunk/device.hpp"
#include "hlthunk/entry.hpp"
#include "model/host_pages.hpp"
#include "model/ledger.hpp"
#include "model/trace.hpp"

namespace gdrkit::twin::gaudi {
namespace {

constexpr unsigned smallest_page_order = 21, largest_page_order = 30;

unsigned long long to_ull(std::uint64_t number) {
    return number;
}

std::uint64_t ledger_id_of(const Device& device, std::uint64_t number) {
    return reinterpret_cast<std::uint64_t>(&device) ^ number;
}

// Find the device for a memory call. Fails with EBUSY after a device reset.
int get_operational_device(int fd, DeviceRef* device) {
    int error = 0;
    *device = find_device(fd, &error);
    if (*device == nullptr) {
        return error;
    }
    std::lock_guard lock((*device)->mutex);
    return (*device)->operational ? 0 : EBUSY;
}

std::uint64_t align_from(std::uint64_t base, std::uint64_t address, std::uint64_t alignment) {
    return base + round_up(address - base, alignment);
}

// Return the lowest free address, so that a freed address is reused at once; 0 if there is none.
template <typename Taken>
std::uint64_t find_lowest_gap(const Taken& taken, std::uint64_t base, std::uint64_t end, std::uint64_t length_bytes,
                              std::uint64_t alignment, auto&& length_of) {
    std::uint64_t candidate = base;
    for (auto next = taken.lower_bound(base); next != taken.end() && next->first < end; ++next) {
        if (next->first >= candidate && next->first - candidate >= length_bytes) {
            break;
        }
        candidate = align_from(base, next->first + length_of(*next), alignment);
    }
    return candidate < end && end - candidate >= length_bytes ? candidate : 0;
}

int choose_page_size(std::uint64_t requested_page_bytes, std::uint64_t* page_bytes) {
    if (requested_page_bytes == 0) {
        *page_bytes = properties().default_page_bytes;
        return 0;
    }
    const bool known = std::has_single_bit(requested_page_bytes) &&
                       requested_page_bytes >= std::uint64_t{1} << smallest_page_order &&
                       requested_page_bytes <= std::uint64_t{1} << largest_page_order;
    *page_bytes = requested_page_bytes;
    return known ? 0 : EINVAL;
}

int allocate(Device* device, std::uint64_t size, std::uint64_t wanted_page, bool shared, std::uint64_t* handle) {
    if (size == 0) {
        return EINVAL;
    }
    if (!properties().has_virtual_memory) {
        *handle = 0; // Nothing is allocated: on the first Gaudi the program manages the memory itself.
        return 0;
    }
    auto created = std::make_shared<Allocation>();
    if (const int error = choose_page_size(wanted_page, &created->page_bytes); error != 0) {
        return error;
    }
    const Properties& device_properties = properties();
    if (size > device_properties.dram_bytes) {
        return ENOMEM;
    }
    created->total_bytes = round_up(size, created->page_bytes);
    std::lock_guard lock(device->mutex);
    created->physical =
        find_lowest_gap(device->physical_used, device_properties.dram_user_base, device_properties.dram_end(),
                        created->total_bytes, created->page_bytes, [](const auto& used) { return used.second; });
    created->memory = Fd(created->physical == 0 ? -1 : make_device_memory(created->total_bytes));
    if (!created->memory) {
        return ENOMEM;
    }
    created->shared = shared;
    created->handle = *handle = ++device->last_handle;
    device->physical_used.emplace(created->physical, created->total_bytes);
    ledger_add("gaudi_memory", ledger_id_of(*device, created->handle));
    device->allocations.emplace(created->handle, std::move(created));
    return 0;
}

int release(Device* device, std::uint64_t handle) {
    if (!properties().has_virtual_memory) {
        return 0;
    }
    std::lock_guard lock(device->mutex);
    const auto found = device->allocations.find(handle & UINT32_MAX);
    if (found == device->allocations.end() || found->second->mapping_count > 0) {
        return EINVAL;
    }
    device->physical_used.erase(found->second->physical);
    static_cast<void>(ledger_remove("gaudi_memory", ledger_id_of(*device, found->first)));
    device->allocations.erase(found);
    return 0;
}

std::uint64_t mapped_bytes(const auto& node) {
    return round_up(node.second.length_bytes + node.first % host_page_bytes, host_page_bytes);
}

bool is_free(const Device& device, std::uint64_t begin, std::uint64_t length_bytes) {
    auto next = device.mappings.lower_bound(begin);
    if (next != device.mappings.end() && next->first - begin < length_bytes) {
        return false;
    }
    return next == device.mappings.begin() || std::prev(next)->first + mapped_bytes(*std::prev(next)) <= begin;
}

int map_allocation(Device* device, std::uint64_t handle, std::uint64_t hint, std::uint64_t* address) {
    std::lock_guard lock(device->mutex);
    const auto found = device->allocations.find(handle & UINT32_MAX);
    if (found == device->allocations.end()) {
        return EINVAL;
    }
    const std::shared_ptr<Allocation>& memory = found->second;
    const Properties& device_properties = properties();
    const std::uint64_t base = device_properties.dram_virtual_base, end = base + 16 * device_properties.dram_bytes;
    const bool hint_fits = hint >= base && hint < end && (hint - base) % memory->page_bytes == 0 &&
                           memory->total_bytes <= end - hint && is_free(*device, hint, memory->total_bytes);
    *address = hint_fits ? hint
                         : find_lowest_gap(device->mappings, base, end, memory->total_bytes, memory->page_bytes,
                                           [](const auto& node) { return mapped_bytes(node); });
    if (*address == 0) {
        return ENOMEM;
    }
    ++memory->mapping_count;
    device->mappings.emplace(*address, Mapping{memory, 0, memory->total_bytes, {}});
    ledger_add("gaudi_mapping", ledger_id_of(*device, *address));
    return 0;
}

// Check host memory as pinning for writing would: EFAULT if a page is not mapped or not writable.
int pin(std::uint64_t begin, std::uint64_t length_bytes) {
    const std::uint64_t first = begin / host_page_bytes * host_page_bytes;
    const std::uint64_t end = round_up(begin + length_bytes, host_page_bytes);
    return check_mapped(first, end, true);
}

int map_host(Device* device, std::uint64_t host_address, std::uint64_t size, std::uint64_t* address) {
    if (size == 0 || host_address + size < host_address) {
        return EINVAL;
    }
    if (const int error = pin(host_address, size); error != 0) {
        return error;
    }
    const std::uint64_t base = properties().host_virtual_base, within = host_address % host_page_bytes;
    std::lock_guard lock(device->mutex);
    const std::uint64_t page = find_lowest_gap(device->mappings, base, base + (std::uint64_t{1} << 47),
                                               round_up(size + within, host_page_bytes), host_page_bytes,
                                               [](const auto& node) { return mapped_bytes(node); });
    if (page == 0) {
        return ENOMEM;
    }
    *address = page + within;
    device->mappings.emplace(*address, Mapping{nullptr, host_address, size, {}});
    ledger_add("gaudi_host_mapping", ledger_id_of(*device, *address));
    return 0;
}

int unmap(Device* device, std::uint64_t address) {
    std::lock_guard lock(device->mutex);
    const auto found = device->mappings.find(address);
    if (found == device->mappings.end()) {
        return EINVAL;
    }
    Mapping& mapping = found->second;
    std::erase_if(mapping.exports, [](std::uint64_t id) { return !is_dmabuf_alive(id); });
    if (!mapping.exports.empty()) {
        return EINVAL; // a dma-buf of this memory is alive
    }
    if (mapping.allocation) {
        --mapping.allocation->mapping_count;
    }
    static_cast<void>(
        ledger_remove(mapping.allocation ? "gaudi_mapping" : "gaudi_host_mapping", ledger_id_of(*device, address)));
    device->mappings.erase(found);
    return 0;
}

} // namespace

GDRKIT_HLTHUNK_ENTRY std::uint64_t hlthunk_device_memory_alloc(int fd, std::uint64_t size, std::uint64_t page_size,
                                                               bool contiguous, bool shared) {
    const std::uint64_t handle = number_entry("hlthunk_device_memory_alloc", [&](std::uint64_t* created) {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : allocate(device.get(), size, page_size, shared, created);
    });
    trace("hlthunk_device_memory_alloc fd=%d size=%llu page_size=%llu contiguous=%d shared=%d -> %#llx", fd,
          to_ull(size), to_ull(page_size), contiguous, shared, to_ull(handle));
    return handle;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_device_memory_free(int fd, std::uint64_t handle) {
    const int result = entry("hlthunk_device_memory_free", [&] {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : release(device.get(), handle);
    });
    trace("hlthunk_device_memory_free fd=%d handle=%#llx -> %d", fd, to_ull(handle), result);
    return result;
}

GDRKIT_HLTHUNK_ENTRY std::uint64_t hlthunk_device_memory_map(int fd, std::uint64_t handle, std::uint64_t hint) {
    const std::uint64_t address = number_entry("hlthunk_device_memory_map", [&](std::uint64_t* created) {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : map_allocation(device.get(), handle, hint, created);
    });
    trace("hlthunk_device_memory_map fd=%d handle=%#llx hint_addr=%#llx -> %#llx", fd, to_ull(handle), to_ull(hint),
          to_ull(address));
    return address;
}

GDRKIT_HLTHUNK_ENTRY std::uint64_t hlthunk_host_memory_map_flags(int fd, void* host, std::uint64_t /*hint*/,
                                                                 std::uint64_t size, std::uint32_t /*flags*/) {
    return number_entry("hlthunk_host_memory_map_flags", [&](std::uint64_t* created) {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : map_host(device.get(), reinterpret_cast<std::uint64_t>(host), size, created);
    });
}

GDRKIT_HLTHUNK_ENTRY std::uint64_t hlthunk_host_memory_map(int fd, void* host, std::uint64_t /*hint*/,
                                                           std::uint64_t size) {
    return number_entry("hlthunk_host_memory_map", [&](std::uint64_t* created) {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : map_host(device.get(), reinterpret_cast<std::uint64_t>(host), size, created);
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_memory_unmap(int fd, std::uint64_t address) {
    const int result = entry("hlthunk_memory_unmap", [&] {
        DeviceRef device;
        const int error = get_operational_device(fd, &device);
        return error != 0 ? error : unmap(device.get(), address);
    });
    trace("hlthunk_memory_unmap fd=%d device_virt_addr=%#llx -> %d", fd, to_ull(address), result);
    return result;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_dram_usage(int fd, DramUsage* usage) {
    return entry("hlthunk_get_dram_usage", [&] {
        int error = 0;
        const DeviceRef device = usage == nullptr ? nullptr : find_device(fd, &error);
        if (!device) {
            return usage == nullptr ? EINVAL : error;
        }
        std::lock_guard lock(device->mutex);
        std::uint64_t used_bytes = 0;
        for (const auto& [physical, length_bytes] : device->physical_used) {
            used_bytes += length_bytes;
        }
        *usage = {properties().dram_end() - properties().dram_user_base - used_bytes, used_bytes};
        return 0;
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_dev_memalloc_page_orders(int fd, std::uint64_t* orders) {
    return entry("hlthunk_get_dev_memalloc_page_orders", [&] {
        unsigned index = 0;
        int error = 0;
        if (orders == nullptr) {
            return EINVAL;
        }
        if (!find_index(fd, &index, &error)) {
            return error;
        }
        *orders = 0;
        for (unsigned order = smallest_page_order; properties().has_virtual_memory && order <= largest_page_order;
             ++order) {
            *orders |= std::uint64_t{1} << order;
        }
        return 0;
    });
}

} // namespace gdrkit::twin::gaudi
