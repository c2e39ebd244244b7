// Tests of the kernel driver's rules for allocating, mapping and exporting, one by one, for the generation that the
// environment selects, and of a PCI BAR that is smaller than the memory.
#include <sys/mman.h>

#include "hlthunk_library.hpp"

using namespace gdrkit::twin::gaudi;

namespace {

constexpr u64 page = 4096, mib = 1 << 20, gib = 1 << 30;

HardwareInfo info_of(int fd) {
    HardwareInfo info{};
    CHECK(hl("hlthunk_get_hw_ip_info", fd, &info) == 0);
    return info;
}

void check_export_succeeds(int fd, u64 size) {
    CHECK(fd >= 0 && lseek(fd, 0, SEEK_END) == static_cast<off_t>(size));
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(mmap(nullptr, page, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED);
    CHECK(close(fd) == 0);
}

void test_gaudi2_and_later(int fd) {
    const u64 total = info_of(fd).device_mem_alloc_default_page_size;
    CHECK(allocate(fd, 0) == 0 && errno == EINVAL);
    CHECK(allocate(fd, page, 3 * mib) == 0 && errno == EINVAL);
    CHECK(allocate(fd, 1000 * gib) == 0 && errno == ENOMEM);
    CHECK(map(fd, 99) == 0 && errno == EINVAL);
    const u64 handle = allocate(fd, page), address = map(fd, handle);
    CHECK(handle != 0 && address != 0 && address % page == 0);
    check_export_succeeds(export_mapped(fd, address, page), page);
    check_export_succeeds(export_mapped(fd, address, page, total - page), page);
    check_export_succeeds(export_mapped(fd, address, total), total);
    for (const std::uint32_t flags : {0U, static_cast<unsigned>(O_RDWR), static_cast<unsigned>(O_CLOEXEC)}) {
        CHECK(export_mapped(-1, address, page, 0, flags) == -EINVAL);
    }
    CHECK(export_mapped(-1, address, page) == -EBADF);
    CHECK(export_mapped(fd, handle, page) == -EINVAL);
    CHECK(export_mapped(fd, address + page, page) == -EINVAL);
    CHECK(export_mapped(fd, address, 0) == -EINVAL && export_mapped(fd, address, 100) == -EINVAL);
    CHECK(export_mapped(fd, address, page, 100) == -EINVAL);
    CHECK(export_mapped(fd, address, total + page) == -EINVAL);
    CHECK(export_mapped(fd, address, 2 * page, ~u64{4095}) == -EINVAL);
    const int exported = export_mapped(fd, address, page);
    CHECK(exported >= 0 && unmap(fd, address) == -EINVAL && release(fd, handle) == -EINVAL);
    CHECK(close(exported) == 0 && unmap(fd, address) == 0 && unmap(fd, address) == -EINVAL);
    CHECK(export_mapped(fd, address, page) == -EINVAL);
    // The next mapping reuses the address at once.
    CHECK(map(fd, handle) == address && unmap(fd, address) == 0);
    CHECK(release(fd, handle) == 0 && release(fd, handle) == -EINVAL && release(fd, 77) == -EINVAL);
    const u64 small = allocate(fd, page, 2 * mib);
    const u64 hinted = map(fd, small, address + 10 * total);
    CHECK(hinted == address + 10 * total && unmap(fd, hinted) == 0 && release(fd, small) == 0);
}

void test_first_gaudi(int fd) {
    const u64 base = info_of(fd).dram_base_address, size = info_of(fd).dram_size;
    CHECK(allocate(fd, page) == 0 && map(fd, 0) == 0 && errno == EINVAL && release(fd, 0) == 0);
    check_export_succeeds(export_physical(fd, base, page), page);
    check_export_succeeds(export_physical(fd, base + size - page, page), page);
    check_export_succeeds(export_mapped(fd, base, page), page);
    CHECK(export_mapped(fd, base, page, page) == -EINVAL);
    for (const u64 address : {base - page, base + 1, base + size, u64{0}, ~u64{4095}}) {
        CHECK(export_physical(fd, address, page) == -EINVAL);
    }
    for (const u64 length : {u64{0}, u64{100}, size + page, ~u64{4095}}) {
        CHECK(export_physical(fd, base, length) == -EINVAL);
    }
}

void test_host_memory_is_refused(int fd) {
    void* const memory = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const u64 address = map_host(fd, memory, 2 * page);
    CHECK(address != 0 && export_mapped(fd, address, page) == -EINVAL && export_physical(fd, address, page) == -EINVAL);
    CHECK(unmap(fd, address) == 0);
    CHECK(map_host(fd, memory, 0) == 0 && errno == EINVAL);
    // Made inaccessible instead of unmapped, because another mapping could reuse the address.
    CHECK(mprotect(memory, 2 * page, PROT_NONE) == 0);
    CHECK(map_host(fd, memory, 2 * page) == 0 && (errno == EFAULT || errno == ENOMEM));
    munmap(memory, 2 * page);
}

// The first 100 MiB are in the BAR. Allocations use the lowest free memory.
void test_only_bar_is_exported(int fd, bool is_first) {
    if (is_first) {
        const u64 base = info_of(fd).dram_base_address, bar_end = 0x20000000 + 600 * mib;
        CHECK(base < bar_end);
        check_export_succeeds(export_physical(fd, bar_end - page, page), page);
        CHECK(export_physical(fd, bar_end - page, 2 * page) == -EINVAL &&
              export_physical(fd, bar_end, page) == -EINVAL);
        return;
    }
    const u64 inside = allocate(fd, page), beyond = allocate(fd, 700 * mib);
    const u64 near = map(fd, inside), far = map(fd, beyond);
    check_export_succeeds(export_mapped(fd, near, page), page);
    // A part inside the BAR is refused too: the driver checks every page of the allocation.
    CHECK(export_mapped(fd, far, page) == -EINVAL);
    CHECK(unmap(fd, near) == 0 && unmap(fd, far) == 0 && release(fd, inside) == 0 && release(fd, beyond) == 0);
}

} // namespace

int main() {
    const int fd = open_first();
    const bool is_first = hl("hlthunk_get_device_name_from_fd", fd) == gaudi1;
    if (std::getenv("GDRKIT_TWINS_GAUDI_BAR_MIB") != nullptr) {
        test_only_bar_is_exported(fd, is_first);
    } else if (is_first) {
        test_first_gaudi(fd);
    } else {
        test_gaudi2_and_later(fd);
    }
    test_host_memory_is_refused(fd);
    CHECK(hl("hlthunk_close", fd) == 0);
    CHECK(state().find("\"handles\":{}") != std::string::npos &&
          state().find("\"open_devices\":0") != std::string::npos);
}
