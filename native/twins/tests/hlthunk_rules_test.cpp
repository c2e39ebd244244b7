// Tests of the software twin of libhl-thunk (the library of Intel Gaudi accelerators): the rules of the kernel driver
// for allocating, mapping and exporting memory. ctest runs this program for each generation of Gaudi, with a PCI BAR as
// large as the memory and with a smaller BAR (GDRKIT_TWINS_GAUDI_BAR_MIB).
#include <sys/mman.h>

#include "hlthunk_library.hpp"

using namespace gdrkit::twin::gaudi;

namespace {

constexpr u64 page_bytes = 4096, mib = 1 << 20, gib = 1 << 30;

HardwareInfo query_info(int fd) {
    HardwareInfo info{};
    CHECK(call_library("hlthunk_get_hw_ip_info", fd, &info) == 0);
    return info;
}

// Check the result of an export, which must be the descriptor of a dma-buf of this size, and close the dma-buf.
void check_and_close_dmabuf(int dmabuf_fd, u64 size_bytes) {
    CHECK(dmabuf_fd >= 0 && lseek(dmabuf_fd, 0, SEEK_END) == static_cast<off_t>(size_bytes));
    CHECK((fcntl(dmabuf_fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(mmap(nullptr, page_bytes, PROT_READ, MAP_SHARED, dmabuf_fd, 0) == MAP_FAILED);
    CHECK(close(dmabuf_fd) == 0);
}

void test_later_gaudis_export_mapped_addresses(int fd) {
    const u64 device_page_bytes = query_info(fd).device_mem_alloc_default_page_size;
    CHECK(allocate(fd, 0) == 0 && errno == EINVAL);
    CHECK(allocate(fd, page_bytes, 3 * mib) == 0 && errno == EINVAL); // 3 MiB is not a page size
    CHECK(allocate(fd, 1000 * gib) == 0 && errno == ENOMEM);
    CHECK(map_memory(fd, 99) == 0 && errno == EINVAL); // 99 is not a handle
    const u64 handle = allocate(fd, page_bytes), address = map_memory(fd, handle);
    CHECK(handle != 0 && address != 0 && address % page_bytes == 0);
    check_and_close_dmabuf(export_mapped(fd, address, page_bytes), page_bytes);
    check_and_close_dmabuf(export_mapped(fd, address, page_bytes, device_page_bytes - page_bytes), page_bytes);
    check_and_close_dmabuf(export_mapped(fd, address, device_page_bytes), device_page_bytes);
    // The library checks the flags before the descriptor. It requires O_RDWR and O_CLOEXEC.
    for (const std::uint32_t flags : {0U, static_cast<unsigned>(O_RDWR), static_cast<unsigned>(O_CLOEXEC)}) {
        CHECK(export_mapped(-1, address, page_bytes, 0, flags) == -EINVAL);
    }
    CHECK(export_mapped(-1, address, page_bytes) == -EBADF);
    // The address must be the start of a mapping. The offset and the size must be multiples of 4096, and the range must
    // be in the allocation.
    CHECK(export_mapped(fd, handle, page_bytes) == -EINVAL);
    CHECK(export_mapped(fd, address + page_bytes, page_bytes) == -EINVAL);
    CHECK(export_mapped(fd, address, 0) == -EINVAL && export_mapped(fd, address, 100) == -EINVAL);
    CHECK(export_mapped(fd, address, page_bytes, 100) == -EINVAL);
    CHECK(export_mapped(fd, address, device_page_bytes + page_bytes) == -EINVAL);
    CHECK(export_mapped(fd, address, 2 * page_bytes, ~u64{4095}) == -EINVAL); // offset + size overflows
    const int dmabuf_fd = export_mapped(fd, address, page_bytes);
    CHECK(dmabuf_fd >= 0 && unmap_memory(fd, address) == -EINVAL && free_memory(fd, handle) == -EINVAL);
    CHECK(close(dmabuf_fd) == 0 && unmap_memory(fd, address) == 0 && unmap_memory(fd, address) == -EINVAL);
    CHECK(export_mapped(fd, address, page_bytes) == -EINVAL);
    // The next mapping reuses the address at once.
    CHECK(map_memory(fd, handle) == address && unmap_memory(fd, address) == 0);
    // 77 is not a handle.
    CHECK(free_memory(fd, handle) == 0 && free_memory(fd, handle) == -EINVAL && free_memory(fd, 77) == -EINVAL);
    const u64 small_handle = allocate(fd, page_bytes, 2 * mib);
    // The driver maps the memory at the address of the hint.
    const u64 hinted_address = map_memory(fd, small_handle, address + 10 * device_page_bytes);
    CHECK(hinted_address == address + 10 * device_page_bytes && unmap_memory(fd, hinted_address) == 0 &&
          free_memory(fd, small_handle) == 0);
}

void test_gaudi1_exports_physical_addresses(int fd) {
    const u64 base = query_info(fd).dram_base_address, size_bytes = query_info(fd).dram_size;
    CHECK(allocate(fd, page_bytes) == 0 && map_memory(fd, 0) == 0 && errno == EINVAL && free_memory(fd, 0) == 0);
    check_and_close_dmabuf(export_physical(fd, base, page_bytes), page_bytes);
    check_and_close_dmabuf(export_physical(fd, base + size_bytes - page_bytes, page_bytes), page_bytes);
    check_and_close_dmabuf(export_mapped(fd, base, page_bytes), page_bytes);
    CHECK(export_mapped(fd, base, page_bytes, page_bytes) == -EINVAL);
    for (const u64 address : {base - page_bytes, base + 1, base + size_bytes, u64{0}, ~u64{4095}}) {
        CHECK(export_physical(fd, address, page_bytes) == -EINVAL);
    }
    for (const u64 length : {u64{0}, u64{100}, size_bytes + page_bytes, ~u64{4095}}) {
        CHECK(export_physical(fd, base, length) == -EINVAL);
    }
}

void test_host_memory_is_refused(int fd) {
    void* const memory = mmap(nullptr, 2 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const u64 address = map_host(fd, memory, 2 * page_bytes);
    CHECK(address != 0 && export_mapped(fd, address, page_bytes) == -EINVAL &&
          export_physical(fd, address, page_bytes) == -EINVAL);
    CHECK(unmap_memory(fd, address) == 0);
    CHECK(map_host(fd, memory, 0) == 0 && errno == EINVAL);
    // Make the memory inaccessible. If it were unmapped, another mapping could reuse its address.
    CHECK(mprotect(memory, 2 * page_bytes, PROT_NONE) == 0);
    CHECK(map_host(fd, memory, 2 * page_bytes) == 0 && (errno == EFAULT || errno == ENOMEM));
    munmap(memory, 2 * page_bytes);
}

// Only the first part of the memory (600 MiB in these tests) is in the BAR. Allocations use the lowest free memory, so
// a small first allocation is in the BAR, and a large second allocation reaches beyond it.
void test_only_bar_is_exported(int fd, bool is_gaudi1) {
    if (is_gaudi1) {
        // The device memory and the BAR begin at 0x20000000. Programs use the memory from `base` on.
        const u64 base = query_info(fd).dram_base_address, bar_end = 0x20000000 + 600 * mib;
        CHECK(base < bar_end);
        check_and_close_dmabuf(export_physical(fd, bar_end - page_bytes, page_bytes), page_bytes);
        CHECK(export_physical(fd, bar_end - page_bytes, 2 * page_bytes) == -EINVAL &&
              export_physical(fd, bar_end, page_bytes) == -EINVAL);
        return;
    }
    const u64 inside_handle = allocate(fd, page_bytes), outside_handle = allocate(fd, 700 * mib);
    const u64 inside_address = map_memory(fd, inside_handle), outside_address = map_memory(fd, outside_handle);
    check_and_close_dmabuf(export_mapped(fd, inside_address, page_bytes), page_bytes);
    // Exporting a part that is inside the BAR fails too, because the driver checks every page of the allocation.
    CHECK(export_mapped(fd, outside_address, page_bytes) == -EINVAL);
    CHECK(unmap_memory(fd, inside_address) == 0 && unmap_memory(fd, outside_address) == 0 &&
          free_memory(fd, inside_handle) == 0 && free_memory(fd, outside_handle) == 0);
}

} // namespace

int main() {
    const int fd = open_first_device();
    const bool is_gaudi1 = call_library("hlthunk_get_device_name_from_fd", fd) == gaudi1;
    if (std::getenv("GDRKIT_TWINS_GAUDI_BAR_MIB") != nullptr) {
        test_only_bar_is_exported(fd, is_gaudi1);
    } else if (is_gaudi1) {
        test_gaudi1_exports_physical_addresses(fd);
    } else {
        test_later_gaudis_export_mapped_addresses(fd);
    }
    test_host_memory_is_refused(fd);
    CHECK(call_library("hlthunk_close", fd) == 0);
    CHECK(read_ledger().find("\"handles\":{}") != std::string::npos &&
          read_ledger().find("\"open_devices\":0") != std::string::npos);
}
