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
    Handle pool = 0, current_pool = 0, stream = 0;
    EXPECT_SUCCESS("cuDeviceGetDefaultMemPool", &pool, 0);
    EXPECT_SUCCESS("cuDeviceGetMemPool", &current_pool, 0);
    CHECK(pool != 0 && pool == current_pool);
    EXPECT_RESULT(invalid_value, "cuMemPoolDestroy", pool);
    EXPECT_SUCCESS("cuStreamCreate", &stream, 1U);
    u64 pointer = 0;
    const u64 free_before = query_free_memory();
    EXPECT_SUCCESS("cuMemAllocAsync", &pointer, u64{2} << 20, stream);
    CHECK(query_pool_attribute(pool, pool_used_current) == 2 << 20);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    write_device(pointer, make_pattern(100, 1));
    u64 pool_of_pointer = 0, context = 1;
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&pool_of_pointer),
                   static_cast<int>(pointer_mempool_handle), pointer);
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&context), static_cast<int>(pointer_context), pointer);
    CHECK(pool_of_pointer == pool && context == 0);
    int fd = -1;
    EXPECT_SUCCESS("cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{2} << 20, range_handle_dmabuf,
                   u64{0});
    close(fd);
    IpcHandle handle{};
    EXPECT_RESULT(invalid_value, "cuIpcGetMemHandle", &handle, pointer);
    const u64 id = query_buffer_id(pointer);
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, stream);
    u64 value = 0;
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", static_cast<void*>(&value),
                  static_cast<int>(pointer_buffer_id), pointer);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    CHECK(query_free_memory() == free_before && query_pool_attribute(pool, pool_used_current) == 0);
    CHECK(query_pool_attribute(pool, pool_used_high) == 2 << 20);
    u64 new_pointer = 0;
    EXPECT_SUCCESS("cuMemAllocAsync", &new_pointer, u64{2} << 20, stream);
    CHECK(new_pointer == pointer && query_buffer_id(new_pointer) > id);
    EXPECT_SUCCESS("cuMemFree_v2", new_pointer); // cuMemFree and cuMemFreeAsync both free pool memory and device memory
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
    u64 threshold = 12345;
    EXPECT_SUCCESS("cuMemPoolSetAttribute", pool, static_cast<int>(pool_release_threshold),
                   static_cast<void*>(&threshold));
    CHECK(query_pool_attribute(pool, pool_release_threshold) == 12345);
    EXPECT_RESULT(invalid_value, "cuMemPoolSetAttribute", pool, static_cast<int>(pool_used_current),
                  static_cast<void*>(&threshold));
    EXPECT_RESULT(invalid_value, "cuMemPoolGetAttribute", pool, 9, static_cast<void*>(&threshold));
    const AccessDescription second_device_access{{location_device, 1}, access_read_write},
        no_access{{location_device, 0}, access_none};
    Handle second_context = 0, popped = 0;
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
    EXPECT_SUCCESS("cuCtxPopCurrent_v2", &popped);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 1);
    EXPECT_RESULT(invalid_value, "cuMemPoolSetAccess", pool, &no_access, u64{1});
    int flags = -1;
    EXPECT_SUCCESS("cuMemPoolGetAccess", &flags, pool, &second_device_access.location);
    CHECK(flags == access_read_write);
    EXPECT_SUCCESS("cuMemPoolTrimTo", pool, u64{0});
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, Handle{0});
    EXPECT_SUCCESS("cuMemPoolDestroy", pool);
    EXPECT_SUCCESS("cuDeviceGetMemPool", &current_pool, 0);
    CHECK(current_pool != pool);
    properties.handle_types = handle_fabric;
    EXPECT_RESULT(not_supported, "cuMemPoolCreate", &pool, &properties);
    properties.handle_types = 0x40;
    EXPECT_RESULT(invalid_value, "cuMemPoolCreate", &pool, &properties);
    properties.handle_types = handle_none;
    properties.allocation_type = allocation_managed;
    EXPECT_RESULT(not_supported, "cuMemPoolCreate", &pool, &properties);
    properties.allocation_type = 3;
    EXPECT_RESULT(invalid_value, "cuMemPoolCreate", &pool, &properties);
}

// The memory comes from the pool of the stream's device, even if another device is current.
void test_pool_is_that_of_the_stream() {
    Handle second_context = 0, popped = 0, stream = 0;
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &second_context, 1);
    EXPECT_SUCCESS("cuCtxPushCurrent_v2", second_context);
    EXPECT_SUCCESS("cuStreamCreate", &stream, 1U);
    EXPECT_SUCCESS("cuCtxPopCurrent_v2", &popped);
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

// The program can read and write the memory of a host pool directly, and a device can copy it.
void test_host_pool_has_host_memory() {
    for (const Location& location : {Location{location_host, 77}, Location{location_host_numa, 0}}) {
        PoolProperties properties{};
        properties.allocation_type = allocation_pinned;
        properties.location = location;
        properties.size_max_bytes = 1 << 20;
        Handle pool = 0;
        u64 pointer = 0, host = 0;
        EXPECT_SUCCESS("cuMemPoolCreate", &pool, &properties);
        EXPECT_SUCCESS("cuCtxSynchronize");
        const u64 free_before = query_free_memory();
        EXPECT_RESULT(out_of_memory, "cuMemAllocFromPoolAsync", &pointer, u64{2} << 20, pool, Handle{0});
        EXPECT_SUCCESS("cuMemAllocFromPoolAsync", &pointer, u64{10000}, pool, Handle{0});
        EXPECT_SUCCESS("cuStreamSynchronize", Handle{0});
        CHECK(query_free_memory() == free_before && query_pool_attribute(pool, pool_used_current) == 10000);
        auto* const bytes = reinterpret_cast<unsigned char*>(pointer);
        const std::vector<unsigned char> expected = make_pattern(10000, 3);
        std::copy(expected.begin(), expected.end(), bytes);
        const u64 memory = allocate(10000);
        EXPECT_SUCCESS("cuMemcpyDtoD_v2", memory, pointer, u64{10000});
        CHECK(read_device(memory, 10000) == expected);
        EXPECT_SUCCESS("cuMemsetD8_v2", pointer + 9999, static_cast<unsigned char>(7), u64{1});
        EXPECT_SUCCESS("cuCtxSynchronize");
        CHECK(bytes[9998] == expected[9998] && bytes[9999] == 7);
        unsigned type = 0;
        EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&type), static_cast<int>(pointer_memory_type),
                       pointer);
        CHECK(type == memory_host);
        EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&host), static_cast<int>(pointer_host_pointer),
                       pointer);
        CHECK(host == pointer);
        int fd = -1;
        EXPECT_RESULT(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{4096},
                      range_handle_dmabuf, u64{0});
        EXPECT_SUCCESS("cuMemFreeAsync", pointer, Handle{0});
        EXPECT_SUCCESS("cuMemFree_v2", memory);
        EXPECT_RESULT(invalid_value, "cuDeviceSetMemPool", 0, pool);
        EXPECT_SUCCESS("cuMemPoolDestroy", pool);
    }
}

void test_wrong_host_pools_are_refused() {
    PoolProperties properties{};
    properties.allocation_type = allocation_pinned;
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
    const Location host{location_host, 5}, device{location_device, 0}, missing{location_device, 99};
    PoolProperties properties{};
    properties.allocation_type = allocation_pinned;
    properties.location = {location_host, 0};
    Handle default_pool = 0, pool = 0, current_pool = 0;
    EXPECT_SUCCESS("cuMemGetDefaultMemPool", &default_pool, &host, int{allocation_pinned});
    EXPECT_RESULT(not_supported, "cuMemGetDefaultMemPool", &current_pool, &host, int{allocation_managed});
    EXPECT_RESULT(invalid_device, "cuMemGetDefaultMemPool", &current_pool, &missing, int{allocation_pinned});
    EXPECT_RESULT(invalid_value, "cuMemPoolDestroy", default_pool);
    EXPECT_SUCCESS("cuMemPoolCreate", &pool, &properties);
    EXPECT_SUCCESS("cuMemSetMemPool", &host, int{allocation_pinned}, pool);
    EXPECT_RESULT(invalid_value, "cuMemSetMemPool", &device, int{allocation_pinned}, pool);
    EXPECT_SUCCESS("cuMemGetMemPool", &current_pool, &host, int{allocation_pinned});
    CHECK(current_pool == pool);
    EXPECT_SUCCESS("cuMemPoolDestroy", pool);
    EXPECT_SUCCESS("cuMemGetMemPool", &current_pool, &host, int{allocation_pinned});
    CHECK(current_pool == default_pool);
    EXPECT_SUCCESS("cuMemGetMemPool", &current_pool, &device, int{allocation_pinned});
    EXPECT_SUCCESS("cuDeviceGetMemPool", &pool, 0);
    CHECK(current_pool == pool);
}

} // namespace

int main() {
    init_device();
    test_pool_is_that_of_the_stream();
    test_default_pool_allocates_in_stream_order();
    test_created_pool_has_size_limit_and_access();
    test_host_pool_has_host_memory();
    test_wrong_host_pools_are_refused();
    test_locations_have_current_pools();
}
