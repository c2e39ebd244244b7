// Memory pools (pool.cpp), and pools of other processes (pool_ipc.cpp). Each allocation of a pool has separate memory;
// the pool only counts its bytes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/cuda_abi.hpp"
#include "cuda/memory.hpp"

namespace gdrkit::twin::cuda {

struct Pool {
    Handle handle = 0;
    Location location{location_device, 0}; // location of the memory: a device, the host, or a NUMA node
    Device device = 0;                     // cpu_device for memory of the host
    std::uint64_t size_max_bytes = 0;      // 0: limited by the device only
    std::uint32_t handle_types = 0;        // CUmemAllocationHandleType bits with which the pool can be exported
    // For an imported pool: the id of the control service of the process that owns the pool, and the handle of the pool
    // in that process. For other pools: 0.
    std::uint64_t owner_service_id = 0;
    Handle handle_in_owner = 0;
    std::mutex mutex;                                // guards the following members
    std::array<int, 4> reuse_attributes{0, 1, 1, 1}; // index: CUmemPool_attribute, 1 to 3; element 0 is unused
    std::uint64_t release_threshold_bytes = 0;
    std::uint64_t used_bytes = 0;
    std::uint64_t used_high_bytes = 0; // the largest used_bytes since the program last reset this mark
    std::map<Device, int> access;      // CUmemAccess_flags that the program has set

    [[nodiscard]] bool is_host() const { return location.type != location_device; }
    [[nodiscard]] bool is_imported() const { return owner_service_id != 0; }
    // Return the CUmemAccess_flags of a device: the flags that the program has set, or the default.
    int get_access(Device accessing_device);
    // Count the bytes as used. Return false if the pool would exceed its maximum size.
    bool add_used_bytes(std::uint64_t length_bytes);
    void subtract_used_bytes(std::uint64_t length_bytes);
};
using PoolRef = std::shared_ptr<Pool>;

// Make a pool for memory of a location. Fail if the location does not exist.
Result make_pool(const Location& location, PoolRef* pool);

// Return the pool with this handle: the default pool of a location, or a pool that the program has created or imported.
// Return null if no pool has this handle.
PoolRef find_pool(Handle handle);

// Give the pool a handle, under which find_pool finds it.
void add_pool(const PoolRef& pool);

// Count an allocation of a pool as freed.
void record_pool_free(Handle pool, std::uint64_t length_bytes);

// Return the CUmemAccess_flags with which a device may access a range of a pool. The range uses the flags of its
// pool, and keeps using them after cuMemPoolDestroy.
int get_pool_access(const Range& range, Device device);

} // namespace gdrkit::twin::cuda
