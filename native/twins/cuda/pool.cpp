// Stream-ordered memory pools: cuMemPool*, cuMemAllocAsync and cuMemFreeAsync.

#include "cuda/pool.hpp"

#include <algorithm>
#include <cstring>
#include <span>

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

// The default pool of each device, and the pool that cuMemAllocAsync uses.
struct DevicePools {
    std::mutex mutex;
    std::map<Device, PoolRef> defaults;
    std::map<Device, PoolRef> current;
};

DevicePools& device_pools() {
    static auto* const instance = new DevicePools;
    return *instance;
}

PoolRef default_pool_locked(DevicePools* state, Device device) {
    PoolRef& pool = state->defaults[device];
    if (!pool) {
        pool = std::make_shared<Pool>();
        pool->handle = new_handle();
        pool->device = device;
    }
    return pool;
}

PoolRef default_pool(Device device) {
    DevicePools& state = device_pools();
    std::lock_guard lock(state.mutex);
    return default_pool_locked(&state, device);
}

PoolRef current_pool(Device device) {
    DevicePools& state = device_pools();
    std::lock_guard lock(state.mutex);
    const PoolRef& pool = state.current[device];
    return pool ? pool : default_pool_locked(&state, device);
}

bool is_default_pool(Handle handle) {
    DevicePools& state = device_pools();
    std::lock_guard lock(state.mutex);
    return std::ranges::any_of(state.defaults, [=](const auto& entry) { return entry.second->handle == handle; });
}

// An imported pool has only the memory that its owner has allocated.
Result allocate_from_pool(const PoolRef& pool, DevicePointer* pointer, std::uint64_t length_bytes) {
    if (pointer == nullptr || !pool || pool->is_imported()) {
        return invalid_value;
    }
    if (length_bytes == 0) {
        *pointer = 0;
        return success;
    }
    if (!pool->charge(length_bytes)) {
        return out_of_memory;
    }
    RangeRef range;
    const Result result = allocate(MemoryKind::pool, pool->device, length_bytes, &range);
    if (result != success) {
        pool->uncharge(length_bytes);
        return result;
    }
    range->pool = pool->handle;
    range->owner = pool;
    range->handle_types = pool->handle_types;
    add_range(range);
    *pointer = range->base;
    return success;
}

Result store_pool_handle(DevicePointer* handle, Device device, PoolRef (*pool_of)(Device)) {
    if (!device_exists(device)) {
        return invalid_device;
    }
    if (handle == nullptr) {
        return invalid_value;
    }
    *handle = pool_of(device)->handle;
    return success;
}

Result set_attribute(Pool* pool, int attribute, const void* value) {
    std::lock_guard lock(pool->mutex);
    std::uint64_t attribute_value = 0;
    if (attribute >= pool_reuse_follow_event_dependencies && attribute <= pool_reuse_allow_internal_dependencies) {
        std::memcpy(&pool->reuse[static_cast<std::size_t>(attribute)], value, sizeof(int));
        return success;
    }
    std::memcpy(&attribute_value, value, sizeof attribute_value);
    if (attribute == pool_release_threshold) {
        pool->release_threshold_bytes = attribute_value;
        return success;
    }
    // A program can only reset the high-water marks, by writing 0.
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
        std::memcpy(value, &pool->reuse[static_cast<std::size_t>(attribute)], sizeof(int));
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

// Allocate memory in a stream, from the pool that `pool_of` returns for the stream.
template <typename PoolOf>
Result allocate_in_stream(const ContextRef& context, DevicePointer* pointer, std::uint64_t length_bytes,
                          Handle stream_handle, PoolOf&& pool_of) {
    StreamRef stream;
    const Result result = find_stream(stream_handle, context, &stream, Capturing::allowed);
    if (result != success) {
        return result;
    }
    const PoolRef pool = pool_of(*stream);
    if (is_captured(stream) && pool && pointer != nullptr && length_bytes != 0) {
        return capture_allocation(stream, pool->device, length_bytes, pointer);
    }
    return allocate_from_pool(pool, pointer, length_bytes);
}

} // namespace

int Pool::access_of(Device accessing_device) {
    std::lock_guard lock(mutex);
    const auto found = access.find(accessing_device);
    const int default_access = accessing_device == device ? access_read_write : access_none;
    return found == access.end() ? default_access : found->second;
}

bool Pool::charge(std::uint64_t length_bytes) {
    std::lock_guard lock(mutex);
    if (size_max_bytes != 0 && length_bytes > size_max_bytes - std::min(size_max_bytes, used_bytes)) {
        return false;
    }
    used_bytes += length_bytes;
    used_high_bytes = std::max(used_high_bytes, used_bytes);
    return true;
}

void Pool::uncharge(std::uint64_t length_bytes) {
    std::lock_guard lock(mutex);
    used_bytes -= length_bytes;
}

PoolRef find_pool(Handle handle) {
    if (PoolRef pool = created_pools().find(handle)) {
        return pool;
    }
    DevicePools& state = device_pools();
    std::lock_guard lock(state.mutex);
    for (const auto& [device, pool] : state.defaults) {
        if (pool->handle == handle) {
            return pool;
        }
    }
    return nullptr;
}

void add_pool(const PoolRef& pool) {
    pool->handle = new_handle();
    created_pools().add(pool->handle, pool);
}

void record_pool_free(Handle handle, std::uint64_t length_bytes) {
    if (const PoolRef pool = find_pool(handle)) {
        pool->uncharge(length_bytes);
    }
}

int pool_access_of(const Range& range, Device device) {
    return std::static_pointer_cast<Pool>(range.owner)->access_of(device);
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetDefaultMemPool(Handle* handle, Device device) {
    return entry("cuDeviceGetDefaultMemPool", [&] { return store_pool_handle(handle, device, default_pool); });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetMemPool(Handle* handle, Device device) {
    return entry("cuDeviceGetMemPool", [&] { return store_pool_handle(handle, device, current_pool); });
}

GDRKIT_CUDA_ENTRY Result cuDeviceSetMemPool(Device device, Handle handle) {
    return entry("cuDeviceSetMemPool", [&] {
        if (!device_exists(device)) {
            return invalid_device;
        }
        const PoolRef pool = find_pool(handle);
        if (!pool || pool->device != device || pool->is_imported()) {
            return invalid_value;
        }
        DevicePools& state = device_pools();
        std::lock_guard lock(state.mutex);
        state.current[device] = pool;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolCreate(Handle* handle, const PoolProperties* properties) {
    return entry("cuMemPoolCreate", [&] {
        if (handle == nullptr || properties == nullptr ||
            (properties->allocation_type != allocation_pinned && properties->allocation_type != allocation_managed)) {
            return invalid_value;
        }
        // An H200 has no pools of managed memory. The twin's machine has no fabric.
        if (properties->allocation_type == allocation_managed || properties->location.type != location_device ||
            (properties->handle_types & ~handle_posix_fd) != 0 || properties->usage != 0) {
            return not_supported;
        }
        if (!device_exists(properties->location.id)) {
            return invalid_device;
        }
        auto pool = std::make_shared<Pool>();
        pool->device = properties->location.id;
        pool->size_max_bytes = properties->size_max_bytes;
        pool->handle_types = static_cast<std::uint32_t>(properties->handle_types);
        add_pool(pool);
        *handle = pool->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolDestroy(Handle handle) {
    return entry("cuMemPoolDestroy", [&] {
        if (is_default_pool(handle)) {
            return invalid_value;
        }
        const PoolRef pool = created_pools().take(handle);
        if (!pool) {
            return invalid_value;
        }
        DevicePools& state = device_pools();
        std::lock_guard lock(state.mutex);
        if (state.current[pool->device] == pool) {
            state.current[pool->device].reset();
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolSetAttribute(Handle handle, int attribute, const void* value) {
    return entry("cuMemPoolSetAttribute", [&] {
        const PoolRef pool = find_pool(handle);
        return pool && value != nullptr ? set_attribute(pool.get(), attribute, value) : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolGetAttribute(Handle handle, int attribute, void* value) {
    return entry("cuMemPoolGetAttribute", [&] {
        const PoolRef pool = find_pool(handle);
        return pool && value != nullptr ? get_attribute(pool.get(), attribute, value) : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolTrimTo(Handle handle, std::size_t) {
    return entry("cuMemPoolTrimTo", [&] { return find_pool(handle) ? success : invalid_value; });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolSetAccess(Handle handle, const AccessDescription* descriptions, std::size_t count) {
    return entry("cuMemPoolSetAccess", [&] {
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
    return entry("cuMemPoolGetAccess", [&] {
        const PoolRef pool = find_pool(handle);
        if (flags == nullptr || location == nullptr || !pool || location->type != location_device ||
            !device_exists(location->id)) {
            return invalid_value;
        }
        *flags = pool->access_of(location->id);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAllocAsync(DevicePointer* pointer, std::size_t length_bytes, Handle stream) {
    return entry_in_context("cuMemAllocAsync", [&](const ContextRef& context) {
        return allocate_in_stream(context, pointer, length_bytes, stream,
                                  [](const Stream& of_call) { return current_pool(of_call.device); });
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAllocFromPoolAsync(DevicePointer* pointer, std::size_t length_bytes, Handle pool,
                                                 Handle stream) {
    return entry_in_context("cuMemAllocFromPoolAsync", [&](const ContextRef& context) {
        return allocate_in_stream(context, pointer, length_bytes, stream,
                                  [&](const Stream&) { return find_pool(pool); });
    });
}

GDRKIT_CUDA_ENTRY Result cuMemFreeAsync(DevicePointer pointer, Handle stream_handle) {
    return entry_in_context("cuMemFreeAsync", [&](const ContextRef& context) {
        StreamRef stream;
        if (const Result result = find_stream(stream_handle, context, &stream, Capturing::allowed); result != success) {
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
        const Slot slot = range->slot;
        enqueue(
            stream,
            [range = std::move(range), slot]() mutable {
                range.reset();
                if (slot.base != 0) {
                    free_slot(slot);
                }
            },
            Timing::delayed);
        return success;
    });
}

} // namespace gdrkit::twin::cuda
