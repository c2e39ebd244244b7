// Virtual memory management, in one process and between two.
#include <fcntl.h>

#include "cuda_peer.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

constexpr u64 granule = 2 << 20;

AllocationProperties properties(int device = 0) {
    AllocationProperties wanted{};
    wanted.type = allocation_pinned;
    wanted.requested_handle_types = handle_posix_fd;
    wanted.location = {location_device, device};
    wanted.gpu_direct_rdma_capable = 1;
    return wanted;
}

u64 reserve(u64 length_bytes) {
    u64 pointer = 0;
    WORKS("cuMemAddressReserve", &pointer, length_bytes, u64{0}, u64{0}, u64{0});
    return pointer;
}

Handle create(u64 length_bytes = granule) {
    Handle handle = 0;
    const AllocationProperties wanted = properties();
    WORKS("cuMemCreate", &handle, length_bytes, &wanted, u64{0});
    return handle;
}

void map(u64 pointer, Handle handle, u64 length_bytes = granule) {
    WORKS("cuMemMap", pointer, length_bytes, u64{0}, handle, u64{0});
}

int allow(u64 pointer, u64 length_bytes, int flags, int type = location_device, int device = 0) {
    const AccessDescription access{{type, device}, flags};
    return cu("cuMemSetAccess", pointer, length_bytes, &access, u64{1});
}

// The other process: takes the memory by its descriptor, checks and changes it.
int peer(int socket) {
    begin();
    std::vector<Fd> fds;
    CHECK(recv_fds(socket, 1, &fds));
    Handle handle = 0;
    WORKS("cuMemImportFromShareableHandle", &handle, reinterpret_cast<void*>(static_cast<long>(fds[0].get())),
          static_cast<int>(handle_posix_fd));
    const u64 pointer = reserve(granule);
    map(pointer, handle);
    CHECK(allow(pointer, granule, access_read_write) == success);
    CHECK(read_device(pointer, 1000) == pattern(1000, 5));
    write_device(pointer, pattern(1000, 6));
    tell(socket, 'd');
    hear<char>(socket);
    CHECK(read_device(pointer, 1000) == pattern(1000, 6)); // the owner has released it
    WORKS("cuMemUnmap", pointer, granule);
    WORKS("cuMemRelease", handle);
    WORKS("cuMemAddressFree", pointer, granule);
    return 0;
}

void between_processes() {
    Peer other;
    begin();
    const u64 before = free_memory(), pointer = reserve(granule);
    const Handle handle = create();
    map(pointer, handle);
    CHECK(allow(pointer, granule, access_read_write) == success);
    write_device(pointer, pattern(1000, 5));
    int fd = -1;
    ANSWERS(invalid_value, "cuMemExportToShareableHandle", static_cast<void*>(&fd), handle,
            static_cast<int>(handle_fabric), u64{0});
    WORKS("cuMemExportToShareableHandle", static_cast<void*>(&fd), handle, static_cast<int>(handle_posix_fd), u64{0});
    Fd shareable(fd);
    CHECK(send_fds(other.socket(), {&fd, 1}));
    CHECK(hear<char>(other.socket()) == 'd');
    CHECK(read_device(pointer, 1000) == pattern(1000, 6));
    shareable.reset();
    WORKS("cuMemUnmap", pointer, granule);
    WORKS("cuMemRelease", handle);
    WORKS("cuMemAddressFree", pointer, granule);
    CHECK(before - free_memory() == granule); // the other process holds it
    tell(other.socket(), 'x');
    char byte = 0;
    CHECK(recv(other.socket(), &byte, 1, 0) == 0);
    CHECK(comes_to_have_free(before));
}

void chunks_of_one_range() {
    const u64 pointer = reserve(4 * granule);
    const Handle first = create(), second = create();
    map(pointer, first);
    map(pointer + granule, second);
    const auto bytes = pattern(1000, 7);
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", pointer, static_cast<const void*>(bytes.data()), u64{1000});
    CHECK(allow(pointer, 2 * granule, access_read_write) == success);
    CHECK(allow(pointer, 4 * granule, access_read_write) == invalid_value);
    CHECK(allow(pointer, 4096, access_read_write) == invalid_value);
    CHECK(allow(pointer, granule, access_read_write, location_device, 9) == invalid_value);
    CHECK(allow(pointer, granule, access_read_write, location_host) == not_supported);
    // A copy may cross chunks; everything else sees one chunk.
    write_device(pointer + granule - 500, bytes);
    CHECK(read_device(pointer + granule - 500, 1000) == bytes);
    u64 base = 0, length = 0;
    WORKS("cuMemGetAddressRange_v2", &base, &length, pointer + granule + 5);
    CHECK(base == pointer + granule && length == granule);
    const u64 first_id = buffer_id(pointer);
    CHECK(buffer_id(pointer + granule) > first_id);
    const unsigned on = 1;
    ANSWERS(not_supported, "cuPointerSetAttribute", static_cast<const void*>(&on),
            static_cast<int>(pointer_sync_memops), pointer);
    // One dma-buf spans both chunks, and none what is not mapped.
    int fd = -1;
    WORKS("cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, 2 * granule, range_handle_dmabuf, u64{0});
    CHECK(lseek(fd, 0, SEEK_END) == static_cast<off_t>(2 * granule));
    close(fd);
    ANSWERS(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, 3 * granule,
            range_handle_dmabuf, u64{0});
    // Read-only, and back.
    CHECK(allow(pointer, granule, access_read) == success);
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", pointer, static_cast<const void*>(bytes.data()), u64{10});
    read_device(pointer, 10);
    u64 flags = 9;
    const Location here{location_device, 0}, there{location_device, 1};
    WORKS("cuMemGetAccess", &flags, &here, pointer);
    CHECK(flags == access_read);
    WORKS("cuMemGetAccess", &flags, &there, pointer);
    CHECK(flags == access_none);
    // Mapped anew, it has another id. Unmapping what is not mapped is no error, unmapping half a chunk is.
    ANSWERS(invalid_value, "cuMemUnmap", pointer, u64{4096});
    WORKS("cuMemUnmap", pointer, granule);
    WORKS("cuMemUnmap", pointer, granule);
    map(pointer, first);
    CHECK(buffer_id(pointer) > first_id);
    ANSWERS(invalid_value, "cuMemAddressFree", pointer, 4 * granule);
    WORKS("cuMemUnmap", pointer, 4 * granule);
    WORKS("cuMemRelease", first);
    WORKS("cuMemRelease", second);
    ANSWERS(invalid_value, "cuMemAddressFree", pointer, granule);
    WORKS("cuMemAddressFree", pointer, 4 * granule);
}

void reserved_addresses() {
    const u64 pointer = reserve(granule);
    u64 start = 0, size = 0;
    unsigned mapped = 7;
    const int numbers[] = {pointer_mapped, pointer_range_start, pointer_range_size};
    void* places[] = {&mapped, &start, &size};
    WORKS("cuPointerGetAttributes", 3U, numbers, places, pointer + 5);
    CHECK(mapped == 0 && start == pointer && size == granule);
    ANSWERS(invalid_value, "cuPointerGetAttribute", places[0], static_cast<int>(pointer_mapped), pointer);
    u64 other = 0;
    ANSWERS(invalid_value, "cuMemAddressReserve", &other, u64{4096}, u64{0}, u64{0}, u64{0});
    ANSWERS(invalid_value, "cuMemAddressReserve", &other, granule, u64{3}, u64{0}, u64{0});
    // More than an address can say; nothing of this process may be unmapped for it.
    ANSWERS(out_of_memory, "cuMemAddressReserve", &other, (u64{1} << 63) + granule, u64{1} << 63, u64{0}, u64{0});
    WORKS("cuMemAddressReserve", &other, granule, 8 * granule, u64{0}, u64{0});
    CHECK(other % (8 * granule) == 0);
    WORKS("cuMemAddressFree", other, granule);
    WORKS("cuMemAddressFree", pointer, granule);
}

void handles() {
    const u64 pointer = reserve(2 * granule);
    Handle handle = create(), again = 0;
    AllocationProperties found{}, wanted = properties();
    WORKS("cuMemGetAllocationPropertiesFromHandle", &found, handle);
    CHECK(found.gpu_direct_rdma_capable == 1 && found.requested_handle_types == handle_posix_fd);
    ANSWERS(not_supported, "cuMemMap", pointer, granule, granule, handle, u64{0});
    ANSWERS(not_supported, "cuMemMap", pointer, 2 * granule, u64{0}, handle, u64{0});
    ANSWERS(invalid_value, "cuMemMap", u64{0x10000000000}, granule, u64{0}, handle, u64{0});
    map(pointer, handle);
    ANSWERS(invalid_value, "cuMemMap", pointer, granule, u64{0}, handle, u64{0});
    map(pointer + granule, handle); // the same memory twice
    CHECK(allow(pointer, 2 * granule, access_read_write) == success);
    write_device(pointer, {1, 2, 3});
    CHECK((read_device(pointer + granule, 3) == std::vector<unsigned char>{1, 2, 3}));
    WORKS("cuMemRetainAllocationHandle", &again, reinterpret_cast<void*>(pointer + 77));
    CHECK(again == handle);
    WORKS("cuMemRelease", handle);
    WORKS("cuMemRelease", handle);
    // Released, still mapped, and to be had again.
    read_device(pointer, 3);
    WORKS("cuMemRetainAllocationHandle", &again, reinterpret_cast<void*>(pointer));
    WORKS("cuMemRelease", again);
    WORKS("cuMemUnmap", pointer, 2 * granule);
    WORKS("cuMemAddressFree", pointer, 2 * granule);
    u64 granularity = 0;
    WORKS("cuMemGetAllocationGranularity", &granularity, &wanted, 0);
    CHECK(granularity == granule);
    ANSWERS(invalid_value, "cuMemGetAllocationGranularity", &granularity, &wanted, 2);
    ANSWERS(invalid_value, "cuMemCreate", &handle, u64{4096}, &wanted, u64{0});
    ANSWERS(out_of_memory, "cuMemCreate", &handle, u64{16} << 30, &wanted, u64{0});
    wanted.location.id = 9;
    ANSWERS(invalid_device, "cuMemCreate", &handle, granule, &wanted, u64{0});
    wanted.location.type = location_host;
    ANSWERS(not_supported, "cuMemCreate", &handle, granule, &wanted, u64{0});
    const auto type = static_cast<int>(handle_posix_fd);
    ANSWERS(unknown_error, "cuMemImportFromShareableHandle", &handle, reinterpret_cast<void*>(9999L), type);
    const Fd null(open("/dev/null", O_RDONLY));
    ANSWERS(invalid_value, "cuMemImportFromShareableHandle", &handle,
            reinterpret_cast<void*>(static_cast<long>(null.get())), type);
}

void second_release_aborts() {
    const int status = status_of_child([] {
        begin();
        const Handle handle = create();
        cu("cuMemRelease", handle);
        cu("cuMemRelease", handle);
    });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

} // namespace

int main(int count, char** arguments) {
    if (count == 3) {
        return peer(std::atoi(arguments[2]));
    }
    second_release_aborts();
    between_processes();
    chunks_of_one_range();
    reserved_addresses();
    handles();
}
