// Stream-ordered memory pools: cuMemPool*, cuMemAllocAsync and cuMemFreeAsync.

#include "cuda/pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "cuda/capture.hpp"
#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/registry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

Registry<Pool>& created_pools() {
    static auto* const instance = new Registry<Pool>("cuda_memory_pool");
    return *instance;
}

// The type and the id of a location: a device, the host (id 0), or a NUMA node of the host.
using LocationKey = std::pair<std::int32_t, std::int32_t>;

LocationKey make_location_key(const Location& location) {
    return {location.type, location.type == location_host ? 0 : location.id};
}

// The default pool of each location, and the pool that the program has chosen for it (cuMemSetMemPool,
// cuDeviceSetMemPool).
struct LocationPools {
    std::mutex mutex;
    std::map<LocationKey, PoolRef> default_pools;
    std::map<LocationKey, PoolRef> chosen_pools;
};

LocationPools& location_pools() {
    static auto* const instance = new LocationPools;
    return *instance;
}

Result get_default_pool_locked(LocationPools* all_pools, const Location& location, PoolRef* default_pool) {
    PoolRef& pool = all_pools->default_pools[make_location_key(location)];
    if (!pool) {
        if (const Result result = make_pool(location, &pool); result != success) {
            all_pools->default_pools.erase(make_location_key(location));
            return result;
        }
        pool->handle = make_handle();
    }
    *default_pool = pool;
    return success;
}

Result get_default_pool(const Location& location, PoolRef* pool) {
    LocationPools& all_pools = location_pools();
    std::lock_guard lock(all_pools.mutex);
    return get_default_pool_locked(&all_pools, location, pool);
}

// Find the pool from which cuMemAllocAsync allocates: the pool that the program has chosen, or the default pool.
Result get_current_pool(const Location& location, PoolRef* pool) {
    LocationPools& all_pools = location_pools();
    std::lock_guard lock(all_pools.mutex);
    const auto entry = all_pools.chosen_pools.find(make_location_key(location));
    if (entry != all_pools.chosen_pools.end()) {
        *pool = entry->second;
        return success;
    }
    return get_default_pool_locked(&all_pools, location, pool);
}

Result set_current_pool(const Location& location, Handle handle) {
    const PoolRef pool = find_pool(handle);
    if (!pool || make_location_key(pool->location) != make_location_key(location) || pool->is_imported()) {
        return invalid_value;
    }
    LocationPools& all_pools = location_pools();
    std::lock_guard lock(all_pools.mutex);
    all_pools.chosen_pools[make_location_key(location)] = pool;
    return success;
}

// A kernel without NUMA support lists no nodes in sysfs, so node 0 always counts as existing.
bool numa_node_exists(int node) {
    const std::string path = "/sys/devices/system/node/node" + std::to_string(node);
    return node == 0 || (node > 0 && access(path.c_str(), F_OK) == 0);
}

bool is_default_pool(Handle handle) {
    LocationPools& all_pools = location_pools();
    std::lock_guard lock(all_pools.mutex);
    return std::ranges::any_of(all_pools.default_pools,
                               [=](const auto& entry) { return entry.second->handle == handle; });
}

// Allocate memory from a pool. Fail for an imported pool: only the process that owns the pool can allocate from it.
// `device` is the stream's device. If the pool has memory of the host, the new range names this device.
Result allocate_from_pool(const PoolRef& pool, Device device, DevicePointer* pointer, std::uint64_t length_bytes) {
    if (pointer == nullptr || !pool || pool->is_imported()) {
        return invalid_value;
    }
    if (length_bytes == 0) {
        *pointer = 0;
        return success;
    }
    if (!pool->add_used_bytes(length_bytes)) {
        return out_of_memory;
    }
    RangeRef range;
    const Result result = pool->is_host() ? make_shared_host_range(device, length_bytes, &range)
                                          : allocate(MemoryKind::pool, pool->device, length_bytes, &range);
    if (result != success) {
        pool->subtract_used_bytes(length_bytes);
        return result;
    }
    range->pool = pool->handle;
    range->owning_object = pool;
    range->handle_types = pool->handle_types;
    add_range(range);
    *pointer = range->base;
    return success;
}

// Store the handle of the location's pool. An error of get_pool has priority over the error for a null `handle`.
Result store_pool_handle(Handle* handle, const Location& location, Result (*get_pool)(const Location&, PoolRef*)) {
    PoolRef pool;
    const Result result = get_pool(location, &pool);
    if (result == success && handle != nullptr) {
        *handle = pool->handle;
    }
    return result != success || handle != nullptr ? result : invalid_value;
}

// Check the arguments of the functions for the pools of a location. An H200 has no pools of managed memory.
Result check_location_and_type(const Location* location, int allocation_type) {
    if (location == nullptr || (allocation_type != allocation_pinned && allocation_type != allocation_managed)) {
        return invalid_value;
    }
    return allocation_type == allocation_pinned ? success : not_supported;
}

Result set_attribute(Pool* pool, int attribute, const void* value) {
    std::lock_guard lock(pool->mutex);
    std::uint64_t attribute_value = 0;
    if (attribute >= pool_reuse_follow_event_dependencies && attribute <= pool_reuse_allow_internal_dependencies) {
        std::memcpy(&pool->reuse_attributes[static_cast<std::size_t>(attribute)], value, sizeof(int));
        return success;
    }
    std::memcpy(&attribute_value, value, sizeof attribute_value);
    if (attribute == pool_release_threshold) {
        pool->release_threshold_bytes = attribute_value;
        return success;
    }
    // A program can write only 0 to a high-water mark, which resets the mark to the current use.
    if ((attribute == pool_reserved_high || attribute == pool_used_high) && attribute_value == 0) {
        pool->used_high_bytes = pool->used_bytes;
        return success;
    }
    return invalid_value;
}

Result get_attribute(Pool* pool, int attribute, void* value) {
    std::lock_guard lock(pool->mutex);
    auto write_value = [value](std::uint64_t attribute_value) {
        std::memcpy(value, &attribute_value, sizeof attribute_value);
        return success;
    };
    switch (attribute) {
    case pool_reuse_follow_event_dependencies:
    case pool_reuse_allow_opportunistic:
    case pool_reuse_allow_internal_dependencies:
        std::memcpy(value, &pool->reuse_attributes[static_cast<std::size_t>(attribute)], sizeof(int));
        return success;
    case pool_release_threshold:
        return write_value(pool->release_threshold_bytes);
    case pool_reserved_current:
    case pool_used_current:
        // The twin's pools keep no freed memory, so reserved equals used.
        return write_value(pool->used_bytes);
    case pool_reserved_high:
    case pool_used_high:
        return write_value(pool->used_high_bytes);
    default:
        return invalid_value;
    }
}

// Allocate memory in a stream, from the pool that `get_pool` returns for the stream.
template <typename GetPool>
Result allocate_in_stream(const ContextRef& context, DevicePointer* pointer, std::uint64_t length_bytes,
                          Handle stream_handle, GetPool&& get_pool) {
    StreamRef stream;
    const Result result = find_stream(stream_handle, context, &stream, CapturePolicy::allow);
    if (result != success) {
        return result;
    }
    const PoolRef pool = get_pool(*stream);
    if (is_captured(stream) && pool && pointer != nullptr && length_bytes != 0) {
        return capture_allocation(stream, pool->device, length_bytes, pointer);
    }
    return allocate_from_pool(pool, stream->device, pointer, length_bytes);
}

} // namespace

Result make_pool(const Location& location, PoolRef* new_pool) {
    auto pool = std::make_shared<Pool>();
    pool->location = location;
    pool->device = cpu_device;
    switch (location.type) {
    case location_device:
        if (!device_exists(location.id)) {
            return invalid_device;
        }
        pool->device = location.id;
        break;
    case location_host:
        pool->location.id = 0;
        break;
    case location_host_numa:
        if (!numa_node_exists(location.id)) {
            return invalid_value;
        }
        break;
    case location_host_numa_current:
        return invalid_value;
    default:
        return not_supported;
    }
    *new_pool = std::move(pool);
    return success;
}

int Pool::get_access(Device accessing_device) {
    std::lock_guard lock(mutex);
    const auto entry = access.find(accessing_device);
    const int default_access = accessing_device == device || is_host() ? access_read_write : access_none;
    return entry == access.end() ? default_access : entry->second;
}

bool Pool::add_used_bytes(std::uint64_t length_bytes) {
    std::lock_guard lock(mutex);
    if (size_max_bytes != 0 && length_bytes > size_max_bytes - std::min(size_max_bytes, used_bytes)) {
        return false;
    }
    used_bytes += length_bytes;
    used_high_bytes = std::max(used_high_bytes, used_bytes);
    return true;
}

void Pool::subtract_used_bytes(std::uint64_t length_bytes) {
    std::lock_guard lock(mutex);
    used_bytes -= length_bytes;
}

PoolRef find_pool(Handle handle) {
    if (PoolRef pool = created_pools().find(handle)) {
        return pool;
    }
    LocationPools& all_pools = location_pools();
    std::lock_guard lock(all_pools.mutex);
    for (const auto& [location, pool] : all_pools.default_pools) {
        if (pool->handle == handle) {
            return pool;
        }
    }
    return nullptr;
}

void add_pool(const PoolRef& pool) {
    pool->handle = make_handle();
    created_pools().add(pool->handle, pool);
}

void record_pool_free(Handle handle, std::uint64_t length_bytes) {
    if (const PoolRef pool = find_pool(handle)) {
        pool->subtract_used_bytes(length_bytes);
    }
}

int get_pool_access(const Range& range, Device device) {
    return std::static_pointer_cast<Pool>(range.owning_object)->get_access(device);
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetDefaultMemPool(Handle* handle, Device device) {
    return run_entry("cuDeviceGetDefaultMemPool", [&] {
        return store_pool_handle(handle, {location_device, device}, get_default_pool);
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetMemPool(Handle* handle, Device device) {
    return run_entry("cuDeviceGetMemPool", [&] {
        return store_pool_handle(handle, {location_device, device}, get_current_pool);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemGetDefaultMemPool(Handle* handle, const Location* location, int allocation_type) {
    return run_entry("cuMemGetDefaultMemPool", [&] {
        const Result result = check_location_and_type(location, allocation_type);
        return result == success ? store_pool_handle(handle, *location, get_default_pool) : result;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemGetMemPool(Handle* handle, const Location* location, int allocation_type) {
    return run_entry("cuMemGetMemPool", [&] {
        const Result result = check_location_and_type(location, allocation_type);
        return result == success ? store_pool_handle(handle, *location, get_current_pool) : result;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemSetMemPool(const Location* location, int allocation_type, Handle pool) {
    return run_entry("cuMemSetMemPool", [&] {
        const Result result = check_location_and_type(location, allocation_type);
        return result == success ? set_current_pool(*location, pool) : result;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceSetMemPool(Device device, Handle handle) {
    return run_entry("cuDeviceSetMemPool", [&] {
        if (!device_exists(device)) {
            return invalid_device;
        }
        return set_current_pool({location_device, device}, handle);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolCreate(Handle* handle, const PoolProperties* properties) {
    return run_entry("cuMemPoolCreate", [&] {
        if (handle == nullptr || properties == nullptr ||
            (properties->allocation_type != allocation_pinned && properties->allocation_type != allocation_managed) ||
            (properties->handle_types & ~handle_types_mask) != 0) {
            return invalid_value;
        }
        // An H200 has no pools of managed memory. The machine of the twins has no fabric, so processes can share the
        // memory only by file descriptors.
        if (properties->allocation_type == allocation_managed || (properties->handle_types & ~handle_posix_fd) != 0 ||
            properties->usage != 0) {
            return not_supported;
        }
        PoolRef pool;
        if (const Result result = make_pool(properties->location, &pool); result != success) {
            return result;
        }
        // Processes can share memory of a NUMA node, but not memory of the whole host.
        if (properties->location.type == location_host && properties->handle_types != handle_none) {
            return invalid_value;
        }
        pool->size_max_bytes = properties->size_max_bytes;
        pool->handle_types = static_cast<std::uint32_t>(properties->handle_types);
        add_pool(pool);
        *handle = pool->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolDestroy(Handle handle) {
    return run_entry("cuMemPoolDestroy", [&] {
        if (is_default_pool(handle)) {
            return invalid_value;
        }
        const PoolRef pool = created_pools().take(handle);
        if (!pool) {
            return invalid_value;
        }
        LocationPools& all_pools = location_pools();
        std::lock_guard lock(all_pools.mutex);
        std::erase_if(all_pools.chosen_pools, [&](const auto& entry) { return entry.second == pool; });
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolSetAttribute(Handle handle, int attribute, const void* value) {
    return run_entry("cuMemPoolSetAttribute", [&] {
        const PoolRef pool = find_pool(handle);
        return pool && value != nullptr ? set_attribute(pool.get(), attribute, value) : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolGetAttribute(Handle handle, int attribute, void* value) {
    return run_entry("cuMemPoolGetAttribute", [&] {
        const PoolRef pool = find_pool(handle);
        return pool && value != nullptr ? get_attribute(pool.get(), attribute, value) : invalid_value;
    });
}

// The twin's pools keep no freed memory that they could release.
GDRKIT_CUDA_ENTRY Result cuMemPoolTrimTo(Handle handle, std::size_t) {
    return run_entry("cuMemPoolTrimTo", [&] { return find_pool(handle) ? success : invalid_value; });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolSetAccess(Handle handle, const AccessDescription* descriptions, std::size_t count) {
    return run_entry("cuMemPoolSetAccess", [&] {
        const PoolRef pool = find_pool(handle);
        if (!pool || (descriptions == nullptr && count != 0)) {
            return invalid_value;
        }
        std::lock_guard lock(pool->mutex);
        for (const AccessDescription& description : std::span(descriptions, count)) {
            const Device device = description.location.id;
            const int flags = description.flags;
            if (description.location.type != location_device || !device_exists(device) ||
                (flags != access_none && flags != access_read_write) ||
                (device == pool->device && flags == access_none)) {
                return invalid_value;
            }
            pool->access[device] = flags;
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolGetAccess(int* flags, Handle handle, const Location* location) {
    return run_entry("cuMemPoolGetAccess", [&] {
        const PoolRef pool = find_pool(handle);
        if (flags == nullptr || location == nullptr || !pool || location->type != location_device ||
            !device_exists(location->id)) {
            return invalid_value;
        }
        *flags = pool->get_access(location->id);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAllocAsync(DevicePointer* pointer, std::size_t length_bytes, Handle stream) {
    return run_entry_in_context("cuMemAllocAsync", [&](const ContextRef& context) {
        return allocate_in_stream(context, pointer, length_bytes, stream, [](const Stream& call_stream) {
            PoolRef pool;
            return get_current_pool({location_device, call_stream.device}, &pool) == success ? pool : nullptr;
        });
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAllocFromPoolAsync(DevicePointer* pointer, std::size_t length_bytes, Handle pool,
                                                 Handle stream) {
    return run_entry_in_context("cuMemAllocFromPoolAsync", [&](const ContextRef& context) {
        return allocate_in_stream(context, pointer, length_bytes, stream,
                                  [&](const Stream&) { return find_pool(pool); });
    });
}

GDRKIT_CUDA_ENTRY Result cuMemFreeAsync(DevicePointer pointer, Handle stream_handle) {
    return run_entry_in_context("cuMemFreeAsync", [&](const ContextRef& context) {
        StreamRef stream;
        if (const Result result = find_stream(stream_handle, context, &stream, CapturePolicy::allow);
            result != success) {
            return result;
        }
        if (pointer == 0) {
            return success;
        }
        if (is_captured(stream)) {
            return capture_node(stream, FreeNode{pointer});
        }
        RangeRef range;
        if (const Result result = remove_range(pointer, {MemoryKind::pool, MemoryKind::device}, &range);
            result != success) {
            return result;
        }
        if (range->pool != 0) {
            record_pool_free(range->pool, range->length_bytes);
        }
        // The pointer is invalid from now on. The memory and the address are freed when the stream reaches this work.
        const AddressSlot slot = range->slot;
        enqueue(
            stream,
            [range = std::move(range), slot]() mutable {
                range.reset();
                if (slot.base != 0) {
                    free_address_slot(slot);
                }
            },
            Timing::delayed);
        return success;
    });
}

} // namespace gdrkit::twin::cuda
