// Memory pools and stream-ordered allocation.
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

u64 pool_attribute(Handle pool, int number) {
    u64 value = 0;
    WORKS("cuMemPoolGetAttribute", pool, number, static_cast<void*>(&value));
    return value;
}

void default_pool() {
    Handle pool = 0, current = 0, stream = 0;
    WORKS("cuDeviceGetDefaultMemPool", &pool, 0);
    WORKS("cuDeviceGetMemPool", &current, 0);
    CHECK(pool != 0 && pool == current);
    ANSWERS(invalid_value, "cuMemPoolDestroy", pool);
    WORKS("cuStreamCreate", &stream, 1U);
    u64 pointer = 0;
    const u64 before = free_memory();
    WORKS("cuMemAllocAsync", &pointer, u64{2} << 20, stream);
    CHECK(pool_attribute(pool, pool_used_current) == 2 << 20);
    WORKS("cuStreamSynchronize", stream);
    write_device(pointer, pattern(100, 1));
    u64 of_pool = 0, context = 1;
    WORKS("cuPointerGetAttribute", static_cast<void*>(&of_pool), static_cast<int>(pointer_mempool_handle), pointer);
    WORKS("cuPointerGetAttribute", static_cast<void*>(&context), static_cast<int>(pointer_context), pointer);
    CHECK(of_pool == pool && context == 0);
    int fd = -1;
    WORKS("cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{2} << 20, range_handle_dmabuf, u64{0});
    close(fd);
    IpcMemHandle handle{};
    ANSWERS(invalid_value, "cuIpcGetMemHandle", &handle, pointer);
    const u64 id = buffer_id(pointer);
    WORKS("cuMemFreeAsync", pointer, stream);
    u64 value = 0;
    ANSWERS(invalid_value, "cuPointerGetAttribute", static_cast<void*>(&value), static_cast<int>(pointer_buffer_id),
            pointer);
    WORKS("cuStreamSynchronize", stream);
    CHECK(free_memory() == before && pool_attribute(pool, pool_used_current) == 0);
    CHECK(pool_attribute(pool, pool_used_high) == 2 << 20);
    u64 again = 0;
    WORKS("cuMemAllocAsync", &again, u64{2} << 20, stream);
    CHECK(again == pointer && buffer_id(again) > id);
    WORKS("cuMemFree_v2", again); // either free will do, for either kind
    const u64 plain = allocate(100);
    WORKS("cuMemFreeAsync", plain, stream);
    WORKS("cuMemAllocAsync", &again, u64{0}, stream);
    CHECK(again == 0);
    WORKS("cuMemFreeAsync", u64{0}, stream);
    WORKS("cuStreamDestroy_v2", stream);
}

void created_pool() {
    PoolProperties properties{};
    properties.allocation_type = allocation_pinned;
    properties.location = {location_device, 0};
    properties.size_max_bytes = 1 << 20;
    Handle pool = 0, current = 0;
    WORKS("cuMemPoolCreate", &pool, &properties);
    WORKS("cuDeviceSetMemPool", 0, pool);
    WORKS("cuDeviceGetMemPool", &current, 0);
    CHECK(current == pool);
    ANSWERS(invalid_value, "cuDeviceSetMemPool", 1, pool);
    u64 pointer = 0;
    ANSWERS(out_of_memory, "cuMemAllocFromPoolAsync", &pointer, u64{2} << 20, pool, Handle{0});
    WORKS("cuMemAllocFromPoolAsync", &pointer, u64{1000}, pool, Handle{0});
    u64 threshold = 12345;
    WORKS("cuMemPoolSetAttribute", pool, static_cast<int>(pool_release_threshold), static_cast<void*>(&threshold));
    CHECK(pool_attribute(pool, pool_release_threshold) == 12345);
    ANSWERS(invalid_value, "cuMemPoolSetAttribute", pool, static_cast<int>(pool_used_current),
            static_cast<void*>(&threshold));
    ANSWERS(invalid_value, "cuMemPoolGetAttribute", pool, 9, static_cast<void*>(&threshold));
    const AccessDescription both{{location_device, 1}, access_read_write}, none{{location_device, 0}, access_none};
    WORKS("cuMemPoolSetAccess", pool, &both, u64{1});
    ANSWERS(invalid_value, "cuMemPoolSetAccess", pool, &none, u64{1});
    int flags = -1;
    WORKS("cuMemPoolGetAccess", &flags, pool, &both.location);
    CHECK(flags == access_read_write);
    WORKS("cuMemPoolTrimTo", pool, u64{0});
    WORKS("cuMemFreeAsync", pointer, Handle{0});
    WORKS("cuMemPoolDestroy", pool);
    WORKS("cuDeviceGetMemPool", &current, 0);
    CHECK(current != pool);
    properties.handle_types = handle_posix_fd;
    ANSWERS(not_supported, "cuMemPoolCreate", &pool, &properties);
}

} // namespace

int main() {
    begin();
    default_pool();
    created_pool();
}
