// Tests of code that works on whole host pages. In this test, sysconf() returns 64 KiB as the size of a page.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "tests/check.hpp"
#include "usrbio/agent/bus_guard.hpp"
#include "usrbio/client/share_handle.hpp"

namespace {

constexpr std::size_t small_page_bytes = 4096, large_page_bytes = 65536;

} // namespace

// The linker option --wrap replaces calls of sysconf() by calls of this function.
extern "C" long __wrap_sysconf(int name);
extern "C" long __real_sysconf(int name);
long __wrap_sysconf(int name) {
    return name == _SC_PAGESIZE ? static_cast<long>(large_page_bytes) : __real_sysconf(name);
}

namespace gdrkit::usrbio {
namespace {

ShareHandle make_vmm_handle(std::uint64_t chunk_bytes) {
    ShareHandle handle;
    handle.kind = ShareKind::vmm;
    handle.chunk_bytes = chunk_bytes;
    handle.descriptor_count = 2;
    handle.allocation_bytes = 2 * chunk_bytes;
    handle.length_bytes = 2 * chunk_bytes;
    handle.device_uuid.fill(1);
    handle.owner = identify_this_process();
    return handle;
}

ShareHandle make_dmabuf_handle(std::uint64_t address) {
    ShareHandle handle;
    handle.kind = ShareKind::dmabuf;
    handle.descriptor_count = 1;
    handle.allocation_bytes = large_page_bytes;
    handle.length_bytes = small_page_bytes;
    handle.address = address;
    handle.device_uuid.fill(1);
    handle.owner = identify_this_process();
    return handle;
}

void test_handle_chunks_are_whole_pages() {
    CHECK(pack(make_vmm_handle(large_page_bytes)));
    CHECK(!pack(make_vmm_handle(small_page_bytes)));
    CHECK(!pack(make_vmm_handle(large_page_bytes + small_page_bytes)));
}

void test_handle_addresses_are_page_aligned() {
    CHECK(pack(make_dmabuf_handle(large_page_bytes)));
    CHECK(!pack(make_dmabuf_handle(large_page_bytes + small_page_bytes)));
}

void test_bus_guard_replaces_a_whole_page() {
    const auto reserved_memory =
        mmap(nullptr, 3 * large_page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(reserved_memory != MAP_FAILED);
    const auto aligned_address =
        (reinterpret_cast<std::uintptr_t>(reserved_memory) + large_page_bytes - 1) & ~(large_page_bytes - 1);
    const int fd = memfd_create("page_size_test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, large_page_bytes) == 0);
    void* memory = mmap(reinterpret_cast<void*>(aligned_address), large_page_bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, fd, 0);
    CHECK(memory != MAP_FAILED);
    auto* bytes = static_cast<volatile unsigned char*>(memory);
    bytes[0] = 1;
    const agent::BusGuard guard(memory, large_page_bytes);
    // After the truncation, the next access raises SIGBUS. The guard then maps zeros in place of the page.
    CHECK(ftruncate(fd, 0) == 0);
    CHECK(bytes[large_page_bytes / 2] == 0 && guard.has_bus_error());
    // Enlarge the file again. The guard has replaced the whole page of 64 KiB, so the mapping does not show the file.
    CHECK(ftruncate(fd, large_page_bytes) == 0);
    const unsigned char new_byte = 2;
    CHECK(pwrite(fd, &new_byte, 1, 0) == 1 && pwrite(fd, &new_byte, 1, large_page_bytes - 1) == 1);
    CHECK(bytes[0] == 0 && bytes[large_page_bytes - 1] == 0);
    CHECK(munmap(reserved_memory, 3 * large_page_bytes) == 0 && close(fd) == 0);
}

} // namespace
} // namespace gdrkit::usrbio

int main() {
    using namespace gdrkit::usrbio;
    test_handle_chunks_are_whole_pages();
    test_handle_addresses_are_page_aligned();
    test_bus_guard_replaces_a_whole_page();
    return 0;
}
