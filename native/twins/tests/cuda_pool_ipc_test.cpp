// Tests of the software twin of libcuda: memory pools that two processes share. Another process owns the pool, and this
// process imports it.
#include <fcntl.h>
#include <sys/mman.h>

#include <array>

#include "cuda_peer.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

// The owner and the importer send each other these messages.
constexpr char importer_has_written = 'w', owner_has_freed = 'f', importer_has_freed = 'd';

// The locations whose pools are shared: a device, and the memory of a NUMA node.
constexpr Location locations[] = {{location_device, 1}, {location_host_numa, 0}};

Handle create_pool(int handle_types, const Location& location = locations[0]) {
    PoolProperties properties{};
    properties.allocation_type = allocation_pinned;
    properties.location = location;
    properties.handle_types = handle_types;
    Handle pool = 0;
    EXPECT_SUCCESS("cuMemPoolCreate", &pool, &properties);
    return pool;
}

int export_pool(Handle pool) {
    int fd = -1;
    EXPECT_SUCCESS("cuMemPoolExportToShareableHandle", static_cast<void*>(&fd), pool, int{handle_posix_fd}, 0ULL);
    return fd;
}

void* to_shareable_handle(int fd) {
    return reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
}

Handle import_pool(int fd) {
    Handle pool = 0;
    EXPECT_SUCCESS("cuMemPoolImportFromShareableHandle", &pool, to_shareable_handle(fd), int{handle_posix_fd}, 0ULL);
    return pool;
}

u64 allocate_from(Handle pool, u64 length_bytes) {
    u64 pointer = 0;
    EXPECT_SUCCESS("cuMemAllocFromPoolAsync", &pointer, length_bytes, pool, Handle{0});
    return pointer;
}

IpcHandle export_pointer(u64 pointer) {
    IpcHandle pointer_data{};
    EXPECT_SUCCESS("cuMemPoolExportPointer", &pointer_data, pointer);
    return pointer_data;
}

// Create a pool, and send the pool and a pointer to its memory to the importer. Free the memory and destroy the pool
// after the importer has freed its pointer.
void share_pool(int socket, const Location& location) {
    const Handle pool = create_pool(handle_posix_fd, location);
    const u64 pointer = allocate_from(pool, 70000);
    write_device(pointer, make_pattern(70000, 1));
    const int fd = export_pool(pool);
    CHECK(send_fds(socket, std::array{fd}));
    close(fd);
    send_value(socket, export_pointer(pointer));
    CHECK(receive_value<char>(socket) == importer_has_written);
    CHECK(read_device(pointer + 7, 100) == make_pattern(100, 2));
    CHECK(receive_value<char>(socket) == importer_has_freed);
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, Handle{0});
    EXPECT_SUCCESS("cuStreamSynchronize", Handle{0});
    EXPECT_SUCCESS("cuMemPoolDestroy", pool);
    send_value(socket, owner_has_freed);
}

// The owning process runs this function.
int run_owner(int socket) {
    use_primary_context(1);
    for (const Location& location : locations) {
        share_pool(socket, location);
    }
    return 0;
}

// Import the pool and the pointer that share_pool() sends, use the memory, and check what an imported pool refuses.
void import_from(const ChildProcess& owner, const Location& location) {
    std::vector<Fd> fds;
    CHECK(recv_fds(owner.socket(), 1, &fds));
    const auto pointer_data = receive_value<IpcHandle>(owner.socket());
    const Handle pool = import_pool(fds[0].get());
    u64 pointer = 0, unused_pointer = 0;
    EXPECT_SUCCESS("cuMemPoolImportPointer", &pointer, pool, &pointer_data);
    int device = -1;
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&device), static_cast<int>(pointer_device_ordinal),
                   pointer);
    CHECK(device == 1);
    CHECK(read_device(pointer, 70000) == make_pattern(70000, 1));
    // A program can read host memory directly.
    if (location.type == location_host_numa) {
        CHECK(reinterpret_cast<const unsigned char*>(pointer)[69999] == make_pattern(70000, 1)[69999]);
    }
    write_device(pointer + 7, make_pattern(100, 2));
    send_value(owner.socket(), importer_has_written);
    // An imported pool allocates nothing, cannot be the pool of a device, and is not exported again.
    EXPECT_RESULT(invalid_value, "cuMemAllocFromPoolAsync", &unused_pointer, u64{100}, pool, Handle{0});
    EXPECT_RESULT(invalid_value, "cuDeviceSetMemPool", 1, pool);
    int fd = -1;
    EXPECT_RESULT(invalid_value, "cuMemPoolExportToShareableHandle", static_cast<void*>(&fd), pool,
                  int{handle_posix_fd}, 0ULL);
    IpcHandle exported_data{};
    EXPECT_RESULT(invalid_value, "cuMemPoolExportPointer", &exported_data, pointer);
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, Handle{0});
    EXPECT_SUCCESS("cuStreamSynchronize", Handle{0});
    send_value(owner.socket(), importer_has_freed);
    CHECK(receive_value<char>(owner.socket()) == owner_has_freed);
    EXPECT_SUCCESS("cuMemPoolDestroy", pool);
}

void test_imported_pool_has_memory_of_its_owner() {
    const ChildProcess owner;
    use_primary_context(1);
    for (const Location& location : locations) {
        import_from(owner, location);
    }
}

void test_malformed_handles_of_pools_are_refused() {
    // A pool without a handle type (`private_pool`) cannot be exported.
    const Handle pool = create_pool(handle_posix_fd), other_pool = create_pool(handle_posix_fd),
                 private_pool = create_pool(handle_none);
    Handle imported_pool = 0;
    int fd = -1;
    EXPECT_RESULT(invalid_value, "cuMemPoolExportToShareableHandle", static_cast<void*>(&fd), private_pool,
                  int{handle_posix_fd}, 0ULL);
    // The flags must be 0.
    EXPECT_RESULT(invalid_value, "cuMemPoolExportToShareableHandle", static_cast<void*>(&fd), pool,
                  int{handle_posix_fd}, 1ULL);
    EXPECT_RESULT(invalid_value, "cuMemPoolExportToShareableHandle", static_cast<void*>(&fd), pool, int{handle_fabric},
                  0ULL);
    const Fd forged_fd(memfd_create("gdrkit-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING)), pool_fd(export_pool(pool)),
        other_pool_fd(export_pool(other_pool));
    // A file with 64 bytes of zeros is not a shareable handle, and -1 is not a descriptor.
    CHECK(ftruncate(forged_fd.get(), 64) == 0);
    EXPECT_RESULT(invalid_value, "cuMemPoolImportFromShareableHandle", &imported_pool,
                  to_shareable_handle(forged_fd.get()), int{handle_posix_fd}, 0ULL);
    EXPECT_RESULT(unknown_error, "cuMemPoolImportFromShareableHandle", &imported_pool, to_shareable_handle(-1),
                  int{handle_posix_fd}, 0ULL);
    // A pointer can be imported only into an import of the pool that owns the memory, and only from unchanged data of
    // cuMemPoolExportPointer.
    u64 pointer = allocate_from(pool, 100), private_pointer = allocate_from(private_pool, 100), imported_pointer = 0;
    IpcHandle pointer_data = export_pointer(pointer), unused_data{};
    EXPECT_RESULT(invalid_value, "cuMemPoolExportPointer", &unused_data, private_pointer);
    EXPECT_RESULT(invalid_value, "cuMemPoolImportPointer", &imported_pointer, import_pool(other_pool_fd.get()),
                  &pointer_data);
    imported_pool = import_pool(pool_fd.get());
    EXPECT_RESULT(invalid_value, "cuMemPoolImportPointer", &imported_pointer, pool, &pointer_data);
    EXPECT_RESULT(invalid_value, "cuMemPoolImportPointer", &imported_pointer, imported_pool, &unused_data);
    for (std::size_t index = 0; index < sizeof pointer_data.reserved; ++index) {
        pointer_data.reserved[index] ^= 0x40; // change one bit, and restore it below
        EXPECT_RESULT(invalid_value, "cuMemPoolImportPointer", &imported_pointer, imported_pool, &pointer_data);
        pointer_data.reserved[index] ^= 0x40;
    }
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, Handle{0});
    EXPECT_RESULT(invalid_value, "cuMemPoolImportPointer", &imported_pointer, imported_pool, &pointer_data);
    EXPECT_SUCCESS("cuMemFreeAsync", private_pointer, Handle{0});
}

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count == 3) {
        return run_owner(std::atoi(arguments[2]));
    }
    test_imported_pool_has_memory_of_its_owner();
    test_malformed_handles_of_pools_are_refused();
}
