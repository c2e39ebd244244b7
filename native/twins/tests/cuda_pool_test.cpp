// Tests of the software twin of libcuda: memory pools and stream-ordered allocation.
#include <algorithm>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

u64 query_pool_attribute(Handle pool, int attribute) {
    u64 value = 0;
    EXPECT_SUCCESS("cuMemPoolGetAttribute", pool, attribute, static_cast<void*>(&value));
    return value;
}

void test_default_pool_allocates_in_stream_order() {
    Handle default_pool = 0, current_pool = 0, stream = 0;
    EXPECT_SUCCESS("cuDeviceGetDefaultMemPool", &default_pool, 0);
    EXPECT_SUCCESS("cuDeviceGetMemPool", &current_pool, 0);
    CHECK(default_pool != 0 && default_pool == current_pool);
    EXPECT_RESULT(invalid_value, "cuMemPoolDestroy", default_pool);
    EXPECT_SUCCESS("cuStreamCreate", &stream, unsigned{stream_non_blocking});
    u64 pointer = 0;
    const u64 free_bytes_before = query_free_memory();
    EXPECT_SUCCESS("cuMemAllocAsync", &pointer, u64{2} << 20, stream);
    CHECK(query_pool_attribute(default_pool, pool_used_current) == 2 << 20);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    write_device(pointer, make_pattern(100, 1));
    u64 owning_pool = 0, context = 1;
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&owning_pool), static_cast<int>(pointer_mempool_handle),
                   pointer);
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&context), static_cast<int>(pointer_context), pointer);
    // Memory of a pool belongs to no context, and legacy CUDA IPC cannot share it.
    CHECK(owning_pool == default_pool && context == 0);
    int fd = -1;
    EXPECT_SUCCESS("cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{2} << 20, range_handle_dmabuf,
                   u64{0});
    close(fd);
    IpcHandle handle{};
    EXPECT_RESULT(invalid_value, "cuIpcGetMemHandle", &handle, pointer);
    const u64 buffer_id = query_buffer_id(pointer);
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, stream);
    u64 unused_id = 0;
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", static_cast<void*>(&unused_id),
                  static_cast<int>(pointer_buffer_id), pointer);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    CHECK(query_free_memory() == free_bytes_before && query_pool_attribute(default_pool, pool_used_current) == 0);
    CHECK(query_pool_attribute(default_pool, pool_used_high) == 2 << 20);
    u64 new_pointer = 0;
    EXPECT_SUCCESS("cuMemAllocAsync", &new_pointer, u64{2} << 20, stream);
    CHECK(new_pointer == pointer && query_buffer_id(new_pointer) > buffer_id);
    // cuMemFree and cuMemFreeAsync accept memory of a pool and memory of cuMemAlloc.
    EXPECT_SUCCESS("cuMemFree_v2", new_pointer);
    const u64 device_pointer = allocate(100);
    EXPECT_SUCCESS("cuMemFreeAsync", device_pointer, stream);
    EXPECT_SUCCESS("cuMemAllocAsync", &new_pointer, u64{0}, stream);
    CHECK(new_pointer == 0);
    EXPECT_SUCCESS("cuMemFreeAsync", u64{0}, stream);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_created_pool_has_size_limit_and_access() {
    PoolProperties properties{};
    properties.allocation_type = allocation_pinned;
    properties.location = {location_device, 0};
    properties.size_max_bytes = 1 << 20;
    Handle pool = 0, current_pool = 0;
    EXPECT_SUCCESS("cuMemPoolCreate", &pool, &properties);
    EXPECT_SUCCESS("cuDeviceSetMemPool", 0, pool);
    EXPECT_SUCCESS("cuDeviceGetMemPool", &current_pool, 0);
    CHECK(current_pool == pool);
    EXPECT_RESULT(invalid_value, "cuDeviceSetMemPool", 1, pool);
    u64 pointer = 0;
    EXPECT_RESULT(out_of_memory, "cuMemAllocFromPoolAsync", &pointer, u64{2} << 20, pool, Handle{0});
    EXPECT_SUCCESS("cuMemAllocFromPoolAsync", &pointer, u64{1000}, pool, Handle{0});
    u64 threshold_bytes = 12345;
    EXPECT_SUCCESS("cuMemPoolSetAttribute", pool, static_cast<int>(pool_release_threshold),
                   static_cast<void*>(&threshold_bytes));
    CHECK(query_pool_attribute(pool, pool_release_threshold) == 12345);
    EXPECT_RESULT(invalid_value, "cuMemPoolSetAttribute", pool, static_cast<int>(pool_used_current),
                  static_cast<void*>(&threshold_bytes));
    // 9 is not an attribute.
    EXPECT_RESULT(invalid_value, "cuMemPoolGetAttribute", pool, 9, static_cast<void*>(&threshold_bytes));
    // Another device cannot access the memory of a pool before the program allows it.
    const AccessDescription second_device_access{{location_device, 1}, access_read_write},
        no_access{{location_device, 0}, access_none};
    Handle second_context = 0, popped_context = 0;
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &second_context, 1);
    EXPECT_SUCCESS("cuCtxPushCurrent_v2", second_context);
    const u64 second_device_memory = allocate(1000);
    EXPECT_RESULT(invalid_value, "cuMemcpyDtoD_v2", second_device_memory, pointer, u64{1000});
    EXPECT_RESULT(invalid_value, "cuMemcpyDtoD_v2", pointer, second_device_memory, u64{1000});
    EXPECT_RESULT(invalid_value, "cuMemcpyAsync", second_device_memory, pointer, u64{1000}, Handle{0});
    EXPECT_SUCCESS("cuMemPoolSetAccess", pool, &second_device_access, u64{1});
    EXPECT_SUCCESS("cuMemcpyDtoD_v2", second_device_memory, pointer, u64{1000});
    EXPECT_SUCCESS("cuMemcpyDtoD_v2", pointer, second_device_memory, u64{1000});
    EXPECT_SUCCESS("cuMemFree_v2", second_device_memory);
    EXPECT_SUCCESS("cuCtxPopCurrent_v2", &popped_context);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 1);
    // The device of a pool always has access.
    EXPECT_RESULT(invalid_value, "cuMemPoolSetAccess", pool, &no_access, u64{1});
    int access_flags = -1;
    EXPECT_SUCCESS("cuMemPoolGetAccess", &access_flags, pool, &second_device_access.location);
    CHECK(access_flags == access_read_write);
    EXPECT_SUCCESS("cuMemPoolTrimTo", pool, u64{0});
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, Handle{0});
    EXPECT_SUCCESS("cuMemPoolDestroy", pool);
    EXPECT_SUCCESS("cuDeviceGetMemPool", &current_pool, 0);
    CHECK(current_pool != pool);
    properties.handle_types = handle_fabric;
    EXPECT_RESULT(not_supported, "cuMemPoolCreate", &pool, &properties);
    properties.handle_types = 0x40; // not a handle type
    EXPECT_RESULT(invalid_value, "cuMemPoolCreate", &pool, &properties);
    properties.handle_types = handle_none;
    properties.allocation_type = allocation_managed;
    EXPECT_RESULT(not_supported, "cuMemPoolCreate", &pool, &properties);
    properties.allocation_type = 3; // not an allocation type
    EXPECT_RESULT(invalid_value, "cuMemPoolCreate", &pool, &properties);
}

// cuMemAllocAsync allocates from the pool of the stream's device, even if another device is current.
void test_pool_is_that_of_the_stream() {
    Handle second_context = 0, popped_context = 0, stream = 0;
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &second_context, 1);
    EXPECT_SUCCESS("cuCtxPushCurrent_v2", second_context);
    EXPECT_SUCCESS("cuStreamCreate", &stream, unsigned{stream_non_blocking});
    EXPECT_SUCCESS("cuCtxPopCurrent_v2", &popped_context);
    u64 pointer = 0;
    EXPECT_SUCCESS("cuMemAllocAsync", &pointer, u64{1000}, stream);
    int device = -1;
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&device), static_cast<int>(pointer_device_ordinal),
                   pointer);
    CHECK(device == 1);
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, stream);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 1);
}

// The program can read and write the memory of a host pool directly, and a device can copy the memory. The id of a
// location of the type location_host has no meaning.
void test_host_pool_has_host_memory() {
    for (const Location& location : {Location{location_host, 77}, Location{location_host_numa, 0}}) {
        PoolProperties properties{};
        properties.allocation_type = allocation_pinned;
        properties.location = location;
        properties.size_max_bytes = 1 << 20;
        Handle pool = 0;
        u64 pointer = 0, host_pointer = 0;
        EXPECT_SUCCESS("cuMemPoolCreate", &pool, &properties);
        EXPECT_SUCCESS("cuCtxSynchronize");
        const u64 free_bytes_before = query_free_memory();
        EXPECT_RESULT(out_of_memory, "cuMemAllocFromPoolAsync", &pointer, u64{2} << 20, pool, Handle{0});
        EXPECT_SUCCESS("cuMemAllocFromPoolAsync", &pointer, u64{10000}, pool, Handle{0});
        EXPECT_SUCCESS("cuStreamSynchronize", Handle{0});
        CHECK(query_free_memory() == free_bytes_before && query_pool_attribute(pool, pool_used_current) == 10000);
        auto* const host_bytes = reinterpret_cast<unsigned char*>(pointer);
        const std::vector<unsigned char> pattern = make_pattern(10000, 3);
        std::copy(pattern.begin(), pattern.end(), host_bytes);
        const u64 device_memory = allocate(10000);
        EXPECT_SUCCESS("cuMemcpyDtoD_v2", device_memory, pointer, u64{10000});
        CHECK(read_device(device_memory, 10000) == pattern);
        EXPECT_SUCCESS("cuMemsetD8_v2", pointer + 9999, static_cast<unsigned char>(7), u64{1});
        EXPECT_SUCCESS("cuCtxSynchronize");
        CHECK(host_bytes[9998] == pattern[9998] && host_bytes[9999] == 7);
        unsigned memory_type = 0;
        EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&memory_type), static_cast<int>(pointer_memory_type),
                       pointer);
        CHECK(memory_type == memory_host);
        EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&host_pointer),
                       static_cast<int>(pointer_host_pointer), pointer);
        CHECK(host_pointer == pointer);
        int fd = -1;
        EXPECT_RESULT(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{4096},
                      range_handle_dmabuf, u64{0});
        EXPECT_SUCCESS("cuMemFreeAsync", pointer, Handle{0});
        EXPECT_SUCCESS("cuMemFree_v2", device_memory);
        EXPECT_RESULT(invalid_value, "cuDeviceSetMemPool", 0, pool);
        EXPECT_SUCCESS("cuMemPoolDestroy", pool);
    }
}

void test_wrong_host_pools_are_refused() {
    PoolProperties properties{};
    properties.allocation_type = allocation_pinned;
    // A pool of host memory (location_host) cannot be shared. The NUMA node of a pool must exist, and must be named:
    // location_host_numa_current is refused.
    properties.handle_types = handle_posix_fd;
    properties.location = {location_host, 0};
    Handle pool = 0;
    EXPECT_RESULT(invalid_value, "cuMemPoolCreate", &pool, &properties);
    properties.location = {location_host_numa_current, 0};
    EXPECT_RESULT(invalid_value, "cuMemPoolCreate", &pool, &properties);
    properties.location = {location_host_numa, -1};
    EXPECT_RESULT(invalid_value, "cuMemPoolCreate", &pool, &properties);
    properties.location = {location_host_numa, 4000};
    EXPECT_RESULT(invalid_value, "cuMemPoolCreate", &pool, &properties);
}

// Each location has a default pool, and a current pool, which the program can set.
void test_locations_have_current_pools() {
    const Location host_location{location_host, 5}, device_location{location_device, 0},
        missing_device_location{location_device, 99};
    PoolProperties properties{};
    properties.allocation_type = allocation_pinned;
    properties.location = {location_host, 0};
    Handle default_pool = 0, pool = 0, current_pool = 0;
    EXPECT_SUCCESS("cuMemGetDefaultMemPool", &default_pool, &host_location, int{allocation_pinned});
    EXPECT_RESULT(not_supported, "cuMemGetDefaultMemPool", &current_pool, &host_location, int{allocation_managed});
    EXPECT_RESULT(invalid_device, "cuMemGetDefaultMemPool", &current_pool, &missing_device_location,
                  int{allocation_pinned});
    EXPECT_RESULT(invalid_value, "cuMemPoolDestroy", default_pool);
    EXPECT_SUCCESS("cuMemPoolCreate", &pool, &properties);
    EXPECT_SUCCESS("cuMemSetMemPool", &host_location, int{allocation_pinned}, pool);
    EXPECT_RESULT(invalid_value, "cuMemSetMemPool", &device_location, int{allocation_pinned}, pool);
    EXPECT_SUCCESS("cuMemGetMemPool", &current_pool, &host_location, int{allocation_pinned});
    CHECK(current_pool == pool);
    EXPECT_SUCCESS("cuMemPoolDestroy", pool);
    EXPECT_SUCCESS("cuMemGetMemPool", &current_pool, &host_location, int{allocation_pinned});
    CHECK(current_pool == default_pool);
    EXPECT_SUCCESS("cuMemGetMemPool", &current_pool, &device_location, int{allocation_pinned});
    EXPECT_SUCCESS("cuDeviceGetMemPool", &pool, 0);
    CHECK(current_pool == pool);
}

} // namespace

int main() {
    use_primary_context();
    test_pool_is_that_of_the_stream();
    test_default_pool_allocates_in_stream_order();
    test_created_pool_has_size_limit_and_access();
    test_host_pool_has_host_memory();
    test_wrong_host_pools_are_refused();
    test_locations_have_current_pools();
}
