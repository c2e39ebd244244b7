// Tests of the software twin of libcuda: dma-buf export of valid and invalid ranges, and memory that is freed while a
// dma-buf of it is open.
#include <sys/mman.h>

#include <cerrno>
#include <memory>

#include "cuda_driver.hpp"
#include "model/dmabuf.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

int export_range(u64 address, u64 length_bytes, int* fd, int handle_type = range_handle_dmabuf, u64 flags = 0) {
    return call_driver("cuMemGetHandleForAddressRange", static_cast<void*>(fd), address, length_bytes, handle_type,
                       flags);
}

// Export a range, and check that the dma-buf has the length of the range and that a plain mmap of it fails.
Fd export_and_check(u64 address, u64 length_bytes) {
    int fd = -1;
    CHECK(export_range(address, length_bytes, &fd) == success);
    Fd dmabuf_fd(fd);
    CHECK(lseek(fd, 0, SEEK_END) == static_cast<off_t>(length_bytes));
    CHECK(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED);
    return dmabuf_fd;
}

// A mapping of the memory of a dma-buf, made by the functions that an importer such as the verbs twin uses.
class ImportedMapping {
public:
    explicit ImportedMapping(int fd) {
        CHECK(import_dmabuf(fd, &imported_dmabuf_) == 0);
        base_ = static_cast<unsigned char*>(map_imported_dmabuf(imported_dmabuf_));
        CHECK(base_ != nullptr);
    }
    ImportedMapping(const ImportedMapping&) = delete;
    ImportedMapping& operator=(const ImportedMapping&) = delete;
    ~ImportedMapping() { munmap(base_, imported_dmabuf_.length_bytes); }
    unsigned char& operator[](std::size_t index) { return base_[index]; }

private:
    ImportedDmabuf imported_dmabuf_;
    unsigned char* base_ = nullptr;
};

void test_invalid_ranges_are_refused() {
    const u64 pointer = allocate(3 << 20);
    int fd = -1;
    // A range must consist of whole pages, and each page must contain bytes of an allocation.
    CHECK(export_range(pointer + 512, 4096, &fd) == invalid_value);
    CHECK(export_range(pointer, 100, &fd) == invalid_value);
    CHECK(export_range(pointer, 0, &fd) == invalid_value);
    CHECK(export_range(pointer, u64{6} << 20, &fd) == invalid_value);
    CHECK(export_range(pointer, 4096, &fd, 2) == invalid_value); // 2 is not a handle type
    // The flag 1 is CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE, and 2 is not a flag.
    CHECK(export_range(pointer, 4096, &fd, range_handle_dmabuf, 1) == not_supported);
    CHECK(export_range(pointer, 4096, &fd, range_handle_dmabuf, 2) == invalid_value);
    // No allocation is at 0x1000. The other range ends beyond 2^64.
    CHECK(export_range(0x1000, 4096, &fd) == invalid_value);
    CHECK(export_range(pointer, ~u64{4095}, &fd) == invalid_value);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
    CHECK(export_range(pointer, 4096, &fd) == invalid_value);
    CHECK(fd == -1);
}

void test_exported_ranges_map_device_memory() {
    const u64 pointer = allocate(1 << 20);
    const auto bytes = make_pattern(1 << 20, 4);
    write_device(pointer, bytes);
    const Fd whole_fd = export_and_check(pointer, 1 << 20), partial_fd = export_and_check(pointer + 8192, 4096);
    ImportedMapping whole_view(whole_fd.get()), partial_view(partial_fd.get());
    CHECK(whole_view[12345] == bytes[12345] && partial_view[100] == bytes[8192 + 100]);
    partial_view[5] = static_cast<unsigned char>(~bytes[8192 + 5]);
    CHECK(read_device(pointer + 8192 + 5, 1)[0] == partial_view[5]);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
}

// A small allocation may begin in the middle of a page, but only whole pages can be exported. In the
// dma-buf, the allocation then begins at the same offset as in its page.
void test_small_allocation_is_exported_by_pages() {
    const u64 first_pointer = allocate(100), second_pointer = allocate(5000);
    const u64 pointer = second_pointer % 4096 != 0 ? second_pointer : first_pointer;
    CHECK(pointer % 4096 != 0);
    int fd = -1;
    CHECK(export_range(pointer, 4096, &fd) == invalid_value);
    const u64 page_address = pointer / 4096 * 4096;
    const Fd dmabuf_fd = export_and_check(page_address, 4096);
    write_device(pointer, {42});
    ImportedMapping view(dmabuf_fd.get());
    CHECK(view[pointer - page_address] == 42);
    EXPECT_SUCCESS("cuMemFree_v2", first_pointer);
    EXPECT_SUCCESS("cuMemFree_v2", second_pointer);
}

void test_dmabuf_keeps_freed_memory() {
    const u64 free_bytes_before = query_free_memory();
    const u64 pointer = allocate(4 << 20);
    const u64 buffer_id = query_buffer_id(pointer);
    write_device(pointer, {1, 2, 3});
    Fd dmabuf_fd = export_and_check(pointer, 4 << 20);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
    CHECK(free_bytes_before - query_free_memory() == 4 << 20);
    // The address is reused, while the dma-buf keeps the old pages alive.
    const u64 new_pointer = allocate(4 << 20);
    CHECK(new_pointer == pointer && query_buffer_id(new_pointer) > buffer_id);
    write_device(new_pointer, {9, 9, 9});
    {
        ImportedMapping view(dmabuf_fd.get());
        CHECK(view[0] == 1 && view[2] == 3);
        view[0] = 77;
        CHECK(read_device(new_pointer, 1)[0] == 9);
        dmabuf_fd.reset();
        CHECK(free_bytes_before - query_free_memory() == 8 << 20); // the importer still references the freed memory
    }
    CHECK(free_bytes_before - query_free_memory() == 4 << 20);
    EXPECT_SUCCESS("cuMemFree_v2", new_pointer);
    CHECK(query_free_memory() == free_bytes_before);
}

} // namespace

int main() {
    use_primary_context();
    // This test runs first. It compares the free memory before and after, so no memory of another test may be freed
    // meanwhile. It also expects that the next allocation gets the freed address.
    test_dmabuf_keeps_freed_memory();
    test_invalid_ranges_are_refused();
    test_exported_ranges_map_device_memory();
    test_small_allocation_is_exported_by_pages();
}
