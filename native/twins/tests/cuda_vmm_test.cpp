// Tests of the software twin of libcuda: virtual memory management (cuMemCreate, cuMemMap and others) within one
// process and between two.
#include <fcntl.h>

#include "cuda_peer.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

constexpr u64 granule_bytes = 2 << 20; // granularity of reservations and allocations

// The owner of the memory and the importer send each other these messages.
constexpr char importer_has_written = 'd', owner_has_released = 'x';

AllocationProperties make_properties(int device = 0) {
    AllocationProperties requested_properties{};
    requested_properties.type = allocation_pinned;
    requested_properties.requested_handle_types = handle_posix_fd;
    requested_properties.location = {location_device, device};
    requested_properties.gpu_direct_rdma_capable = 1;
    return requested_properties;
}

u64 reserve_addresses(u64 length_bytes) {
    u64 pointer = 0;
    EXPECT_SUCCESS("cuMemAddressReserve", &pointer, length_bytes, u64{0}, u64{0}, u64{0});
    return pointer;
}

Handle create_memory(u64 length_bytes = granule_bytes) {
    Handle handle = 0;
    const AllocationProperties requested_properties = make_properties();
    EXPECT_SUCCESS("cuMemCreate", &handle, length_bytes, &requested_properties, u64{0});
    return handle;
}

void map_memory(u64 pointer, Handle handle, u64 length_bytes = granule_bytes) {
    EXPECT_SUCCESS("cuMemMap", pointer, length_bytes, u64{0}, handle, u64{0});
}

int set_access(u64 pointer, u64 length_bytes, int access_flags, int location_type = location_device, int device = 0) {
    const AccessDescription access{{location_type, device}, access_flags};
    return call_driver("cuMemSetAccess", pointer, length_bytes, &access, u64{1});
}

// The importing process runs this function. It imports the memory by its descriptor, checks the data and changes it.
int run_importer(int socket) {
    use_primary_context();
    std::vector<Fd> fds;
    CHECK(recv_fds(socket, 1, &fds));
    Handle handle = 0;
    EXPECT_SUCCESS("cuMemImportFromShareableHandle", &handle, reinterpret_cast<void*>(static_cast<long>(fds[0].get())),
                   static_cast<int>(handle_posix_fd));
    const u64 pointer = reserve_addresses(granule_bytes);
    map_memory(pointer, handle);
    CHECK(set_access(pointer, granule_bytes, access_read_write) == success);
    CHECK(read_device(pointer, 1000) == make_pattern(1000, 5));
    write_device(pointer, make_pattern(1000, 6));
    send_value(socket, importer_has_written);
    CHECK(receive_value<char>(socket) == owner_has_released);
    CHECK(read_device(pointer, 1000) == make_pattern(1000, 6));
    EXPECT_SUCCESS("cuMemUnmap", pointer, granule_bytes);
    EXPECT_SUCCESS("cuMemRelease", handle);
    EXPECT_SUCCESS("cuMemAddressFree", pointer, granule_bytes);
    return 0;
}

void test_exported_memory_is_shared_by_processes() {
    ChildProcess importer;
    use_primary_context();
    const u64 free_bytes_before = query_free_memory(), pointer = reserve_addresses(granule_bytes);
    const Handle handle = create_memory();
    map_memory(pointer, handle);
    CHECK(set_access(pointer, granule_bytes, access_read_write) == success);
    write_device(pointer, make_pattern(1000, 5));
    int fd = -1;
    // The memory was created for export as a file descriptor, not as a fabric handle.
    EXPECT_RESULT(invalid_value, "cuMemExportToShareableHandle", static_cast<void*>(&fd), handle,
                  static_cast<int>(handle_fabric), u64{0});
    EXPECT_SUCCESS("cuMemExportToShareableHandle", static_cast<void*>(&fd), handle, static_cast<int>(handle_posix_fd),
                   u64{0});
    Fd shareable_fd(fd);
    CHECK(send_fds(importer.socket(), {&fd, 1}));
    CHECK(receive_value<char>(importer.socket()) == importer_has_written);
    CHECK(read_device(pointer, 1000) == make_pattern(1000, 6));
    shareable_fd.reset();
    EXPECT_SUCCESS("cuMemUnmap", pointer, granule_bytes);
    EXPECT_SUCCESS("cuMemRelease", handle);
    EXPECT_SUCCESS("cuMemAddressFree", pointer, granule_bytes);
    CHECK(free_bytes_before - query_free_memory() == granule_bytes); // the importer still references the memory
    send_value(importer.socket(), owner_has_released);
    // Wait until the importer has exited: the kernel then closes its socket.
    char byte = 0;
    CHECK(recv(importer.socket(), &byte, 1, 0) == 0);
    CHECK(wait_for_free_memory(free_bytes_before));
}

void test_copy_crosses_adjacent_mappings() {
    const u64 pointer = reserve_addresses(4 * granule_bytes);
    const Handle first_handle = create_memory(), second_handle = create_memory();
    map_memory(pointer, first_handle);
    map_memory(pointer + granule_bytes, second_handle);
    // A new mapping allows no access. cuMemSetAccess needs whole mappings and an existing device.
    const auto bytes = make_pattern(1000, 7);
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, static_cast<const void*>(bytes.data()), u64{1000});
    CHECK(set_access(pointer, 2 * granule_bytes, access_read_write) == success);
    CHECK(set_access(pointer, 4 * granule_bytes, access_read_write) == invalid_value);
    CHECK(set_access(pointer, 4096, access_read_write) == invalid_value);
    CHECK(set_access(pointer, granule_bytes, access_read_write, location_device, 9) == invalid_value);
    CHECK(set_access(pointer, granule_bytes, access_read_write, location_host) == not_supported);
    // A copy may cross from one mapping into the next. A query describes only the mapping of its pointer.
    write_device(pointer + granule_bytes - 500, bytes);
    CHECK(read_device(pointer + granule_bytes - 500, 1000) == bytes);
    u64 base = 0, length_bytes = 0;
    EXPECT_SUCCESS("cuMemGetAddressRange_v2", &base, &length_bytes, pointer + granule_bytes + 5);
    CHECK(base == pointer + granule_bytes && length_bytes == granule_bytes);
    const u64 first_buffer_id = query_buffer_id(pointer);
    CHECK(query_buffer_id(pointer + granule_bytes) > first_buffer_id);
    // The attribute SYNC_MEMOPS cannot be set for mapped memory.
    const unsigned sync_memops = 1;
    EXPECT_RESULT(not_supported, "cuPointerSetAttribute", static_cast<const void*>(&sync_memops),
                  static_cast<int>(pointer_sync_memops), pointer);
    // A dma-buf can span both mappings but no unmapped addresses.
    int fd = -1;
    EXPECT_SUCCESS("cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, 2 * granule_bytes,
                   range_handle_dmabuf, u64{0});
    CHECK(lseek(fd, 0, SEEK_END) == static_cast<off_t>(2 * granule_bytes));
    close(fd);
    EXPECT_RESULT(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, 3 * granule_bytes,
                  range_handle_dmabuf, u64{0});
    // A read-only mapping refuses writes.
    CHECK(set_access(pointer, granule_bytes, access_read) == success);
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, static_cast<const void*>(bytes.data()), u64{10});
    read_device(pointer, 10); // succeeds
    u64 access_flags = 9;
    const Location first_device{location_device, 0}, second_device{location_device, 1};
    EXPECT_SUCCESS("cuMemGetAccess", &access_flags, &first_device, pointer);
    CHECK(access_flags == access_read);
    EXPECT_SUCCESS("cuMemGetAccess", &access_flags, &second_device, pointer);
    CHECK(access_flags == access_none);
    // Unmapping a part of a mapping is an error, but unmapping addresses without a mapping is not. A new mapping has a
    // new buffer id.
    EXPECT_RESULT(invalid_value, "cuMemUnmap", pointer, u64{4096});
    EXPECT_SUCCESS("cuMemUnmap", pointer, granule_bytes);
    EXPECT_SUCCESS("cuMemUnmap", pointer, granule_bytes);
    map_memory(pointer, first_handle);
    CHECK(query_buffer_id(pointer) > first_buffer_id);
    EXPECT_RESULT(invalid_value, "cuMemAddressFree", pointer, 4 * granule_bytes);
    EXPECT_SUCCESS("cuMemUnmap", pointer, 4 * granule_bytes);
    EXPECT_SUCCESS("cuMemRelease", first_handle);
    EXPECT_SUCCESS("cuMemRelease", second_handle);
    EXPECT_RESULT(invalid_value, "cuMemAddressFree", pointer, granule_bytes);
    EXPECT_SUCCESS("cuMemAddressFree", pointer, 4 * granule_bytes);
}

void test_reserved_addresses_are_not_mapped() {
    const u64 pointer = reserve_addresses(granule_bytes);
    // cuPointerGetAttributes describes a reservation. cuPointerGetAttribute fails for it.
    u64 range_start = 0, range_bytes = 0;
    unsigned is_mapped = 7;
    const int attributes[] = {pointer_mapped, pointer_range_start, pointer_range_size};
    void* result_pointers[] = {&is_mapped, &range_start, &range_bytes};
    EXPECT_SUCCESS("cuPointerGetAttributes", 3U, attributes, result_pointers, pointer + 5);
    CHECK(is_mapped == 0 && range_start == pointer && range_bytes == granule_bytes);
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result_pointers[0], static_cast<int>(pointer_mapped),
                  pointer);
    u64 other_pointer = 0;
    EXPECT_RESULT(invalid_value, "cuMemAddressReserve", &other_pointer, u64{4096}, u64{0}, u64{0}, u64{0});
    EXPECT_RESULT(invalid_value, "cuMemAddressReserve", &other_pointer, granule_bytes, u64{3}, u64{0},
                  u64{0}); // the alignment must be a power of two
    // The sum of the length and the alignment overflows 64 bits. The call must fail, and must not unmap memory of this
    // process.
    EXPECT_RESULT(out_of_memory, "cuMemAddressReserve", &other_pointer, (u64{1} << 63) + granule_bytes, u64{1} << 63,
                  u64{0}, u64{0});
    EXPECT_SUCCESS("cuMemAddressReserve", &other_pointer, granule_bytes, 8 * granule_bytes, u64{0}, u64{0});
    CHECK(other_pointer % (8 * granule_bytes) == 0);
    EXPECT_SUCCESS("cuMemAddressFree", other_pointer, granule_bytes);
    EXPECT_SUCCESS("cuMemAddressFree", pointer, granule_bytes);
}

void test_released_handle_can_be_retained_again() {
    const u64 pointer = reserve_addresses(2 * granule_bytes);
    Handle handle = create_memory(), retained_handle = 0;
    AllocationProperties reported_properties{}, requested_properties = make_properties();
    EXPECT_SUCCESS("cuMemGetAllocationPropertiesFromHandle", &reported_properties, handle);
    CHECK(reported_properties.gpu_direct_rdma_capable == 1 &&
          reported_properties.requested_handle_types == handle_posix_fd);
    // The twin maps only a whole allocation, and only at reserved addresses.
    EXPECT_RESULT(not_supported, "cuMemMap", pointer, granule_bytes, granule_bytes, handle, u64{0});
    EXPECT_RESULT(not_supported, "cuMemMap", pointer, 2 * granule_bytes, u64{0}, handle, u64{0});
    EXPECT_RESULT(invalid_value, "cuMemMap", u64{0x10000000000}, granule_bytes, u64{0}, handle, u64{0});
    map_memory(pointer, handle);
    EXPECT_RESULT(invalid_value, "cuMemMap", pointer, granule_bytes, u64{0}, handle, u64{0});
    map_memory(pointer + granule_bytes, handle); // a second mapping of the same memory
    CHECK(set_access(pointer, 2 * granule_bytes, access_read_write) == success);
    write_device(pointer, {1, 2, 3});
    CHECK((read_device(pointer + granule_bytes, 3) == std::vector<unsigned char>{1, 2, 3}));
    EXPECT_SUCCESS("cuMemRetainAllocationHandle", &retained_handle, reinterpret_cast<void*>(pointer + 77));
    CHECK(retained_handle == handle);
    EXPECT_SUCCESS("cuMemRelease", handle);
    EXPECT_SUCCESS("cuMemRelease", handle);
    // The mappings keep the memory alive, and a released handle of mapped memory can be retained again.
    read_device(pointer, 3);
    EXPECT_SUCCESS("cuMemRetainAllocationHandle", &retained_handle, reinterpret_cast<void*>(pointer));
    EXPECT_SUCCESS("cuMemRelease", retained_handle);
    EXPECT_SUCCESS("cuMemUnmap", pointer, 2 * granule_bytes);
    EXPECT_SUCCESS("cuMemAddressFree", pointer, 2 * granule_bytes);
    u64 granularity_bytes = 0;
    EXPECT_SUCCESS("cuMemGetAllocationGranularity", &granularity_bytes, &requested_properties, 0);
    CHECK(granularity_bytes == granule_bytes);
    EXPECT_RESULT(invalid_value, "cuMemGetAllocationGranularity", &granularity_bytes, &requested_properties,
                  2); // not an option
    EXPECT_RESULT(invalid_value, "cuMemCreate", &handle, u64{4096}, &requested_properties, u64{0});
    EXPECT_RESULT(out_of_memory, "cuMemCreate", &handle, u64{16} << 30, &requested_properties, u64{0});
    requested_properties.location.id = 9;
    EXPECT_RESULT(invalid_device, "cuMemCreate", &handle, granule_bytes, &requested_properties, u64{0});
    requested_properties.location.type = location_host;
    EXPECT_RESULT(not_supported, "cuMemCreate", &handle, granule_bytes, &requested_properties, u64{0});
    // 9999 is not an open descriptor, and /dev/null is not an exported allocation.
    const auto handle_type = static_cast<int>(handle_posix_fd);
    EXPECT_RESULT(unknown_error, "cuMemImportFromShareableHandle", &handle, reinterpret_cast<void*>(9999L),
                  handle_type);
    const Fd dev_null(open("/dev/null", O_RDONLY));
    EXPECT_RESULT(invalid_value, "cuMemImportFromShareableHandle", &handle,
                  reinterpret_cast<void*>(static_cast<long>(dev_null.get())), handle_type);
}

void test_second_release_aborts() {
    const int status = run_in_child([] {
        use_primary_context();
        const Handle handle = create_memory();
        call_driver("cuMemRelease", handle);
        call_driver("cuMemRelease", handle);
    });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count == 3) {
        return run_importer(std::atoi(arguments[2]));
    }
    test_second_release_aborts();
    test_exported_memory_is_shared_by_processes();
    test_copy_crosses_adjacent_mappings();
    test_reserved_addresses_are_not_mapped();
    test_released_handle_can_be_retained_again();
}
