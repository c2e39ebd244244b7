// Tests of the software twin of libibverbs: registration of host memory and of dma-bufs, the errno for each invalid
// argument, and the limit of locked memory (RLIMIT_MEMLOCK).
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <linux/capability.h>

#include <set>

#include "model/dmabuf.hpp"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t page_bytes = 4096;

void test_host_memory_registration_is_checked() {
    Endpoint endpoint;
    alignas(page_bytes) static std::uint8_t memory[4 * page_bytes];
    const auto check_fails = [&](void* address, std::size_t length, std::uint64_t iova, unsigned access_flags,
                                 int expected_error) {
        errno = 0;
        CHECK(ibv_reg_mr_iova2(endpoint.pd, address, length, iova, access_flags) == nullptr && errno == expected_error);
    };
    const std::uint64_t memory_address = address_of(memory);
    check_fails(memory, page_bytes, memory_address + 1, read_write_access, EINVAL); // another page offset
    check_fails(memory, 0, memory_address, read_write_access, EINVAL);
    check_fails(memory, page_bytes, memory_address, IBV_ACCESS_REMOTE_WRITE, EINVAL); // needs IBV_ACCESS_LOCAL_WRITE
    check_fails(memory, page_bytes, memory_address, IBV_ACCESS_REMOTE_ATOMIC, EINVAL);
    check_fails(memory, page_bytes, memory_address, 1U << 15, EINVAL); // an unknown flag
    check_fails(memory, page_bytes, memory_address, IBV_ACCESS_ON_DEMAND, EINVAL);
    check_fails(memory, ~0UL - page_bytes, memory_address, read_write_access, EINVAL); // the end overflows
    check_fails(nullptr, page_bytes, 0, read_write_access, EFAULT);
    // Unmap the second of three pages, and make the third page inaccessible and then read-only.
    void* const mapping_with_hole =
        mmap(nullptr, 3 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    auto* const first_page = static_cast<char*>(mapping_with_hole);
    CHECK(munmap(first_page + page_bytes, page_bytes) == 0);
    check_fails(mapping_with_hole, 3 * page_bytes, address_of(mapping_with_hole), read_write_access, EFAULT);
    CHECK(mprotect(first_page + 2 * page_bytes, page_bytes, PROT_NONE) == 0);
    check_fails(first_page + 2 * page_bytes, 1, address_of(first_page + 2 * page_bytes), 0, EFAULT);
    CHECK(mprotect(first_page + 2 * page_bytes, page_bytes, PROT_READ) == 0);
    check_fails(first_page + 2 * page_bytes, 1, address_of(first_page + 2 * page_bytes), IBV_ACCESS_LOCAL_WRITE,
                EFAULT);
    ibv_mr* const read_only_mr =
        ibv_reg_mr(endpoint.pd, first_page + 2 * page_bytes, page_bytes, IBV_ACCESS_REMOTE_READ);
    CHECK(read_only_mr != nullptr && ibv_dereg_mr(read_only_mr) == 0);

    // Each registration gets keys that no earlier registration had.
    std::set<std::uint32_t> used_keys;
    for (int count = 0; count < 200; ++count) {
        ibv_mr* const mr = ibv_reg_mr(endpoint.pd, memory + 5, 100, read_write_access | IBV_ACCESS_RELAXED_ORDERING);
        CHECK(mr != nullptr && mr->addr == memory + 5 && mr->length == 100 && mr->pd == endpoint.pd);
        CHECK(used_keys.insert(mr->lkey).second && used_keys.insert(mr->rkey).second);
        CHECK(ibv_dereg_mr(mr) == 0);
    }
}

// Register a part of a dma-buf, deregister it again, and return 0, or the errno of ibv_reg_dmabuf_mr.
int import_and_get_errno(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int dmabuf_fd,
                         int access) {
    errno = 0;
    ibv_mr* const mr = ibv_reg_dmabuf_mr(pd, offset, length, iova, dmabuf_fd, access);
    const int error = errno;
    CHECK(mr == nullptr || ibv_dereg_mr(mr) == 0);
    return mr == nullptr ? error : 0;
}

// The twin checks the arguments in the order of the kernel, so the first wrong argument decides the errno. With the
// descriptor -1, EINVAL shows that an argument is checked before the descriptor, and EBADF that it is checked after it.
void test_invalid_dmabuf_imports_fail() {
    Endpoint endpoint;
    const Fd device_memory(make_device_memory(16 * page_bytes));
    const Extent whole_extent{device_memory.get(), 0, 16 * page_bytes};
    const Fd dmabuf(export_dmabuf({&whole_extent, 1}));
    CHECK(device_memory && dmabuf);
    const Fd plain_memfd(memfd_create("plain", MFD_CLOEXEC));
    CHECK(ftruncate(plain_memfd.get(), 16 * page_bytes) == 0);
    const Fd dev_null(open("/dev/null", O_RDWR | O_CLOEXEC));
    const int dmabuf_fd = dmabuf.get();
    constexpr int access = read_write_access;

    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0, dmabuf_fd, access) == 0);
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0x7f0000000000, dmabuf_fd,
                               read_write_atomic_access | IBV_ACCESS_RELAXED_ORDERING) == 0);
    CHECK(import_and_get_errno(endpoint.pd, 3, page_bytes, page_bytes + 3, dmabuf_fd, access) == 0);
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 1, -1, access) == EINVAL); // another page offset
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0, -1, access | IBV_ACCESS_ON_DEMAND) == EINVAL);
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0, -1, access | IBV_ACCESS_MW_BIND) == EINVAL);
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0, -1, IBV_ACCESS_REMOTE_WRITE) == EINVAL);
    // The end of the range overflows.
    CHECK(import_and_get_errno(endpoint.pd, ~0UL - page_bytes + 1, page_bytes, 0, -1, access) == EINVAL);
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0, -1, access) == EBADF);
    CHECK(import_and_get_errno(endpoint.pd, 0, 0, 0, -1, access) == EBADF);
    CHECK(import_and_get_errno(endpoint.pd, 0, 1UL << 40, 0, -1, access) == EBADF);
    // These descriptors are not dma-bufs.
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0, plain_memfd.get(), access) == EINVAL);
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0, dev_null.get(), access) == EINVAL);
    // The first two ranges end after the end of the dma-buf, and the third range is empty.
    CHECK(import_and_get_errno(endpoint.pd, 0, 16 * page_bytes + 1, 0, dmabuf_fd, access) == EINVAL);
    CHECK(import_and_get_errno(endpoint.pd, 16 * page_bytes, 1, 0, dmabuf_fd, access) == EINVAL);
    CHECK(import_and_get_errno(endpoint.pd, 0, 0, 0, dmabuf_fd, access) == EINVAL);
    ibv_mr* const mr = ibv_reg_dmabuf_mr(endpoint.pd, page_bytes + 8, 100, 0x5000008, dmabuf_fd, access);
    // As in rdma-core, the address of the region is the offset in the dma-buf, not the iova.
    CHECK(mr != nullptr && address_of(mr->addr) == page_bytes + 8 && mr->length == 100);
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(mmap(nullptr, page_bytes, PROT_READ, MAP_SHARED, dmabuf_fd, 0) == MAP_FAILED); // the CPU cannot map a dma-buf
}

// The dma-buf has two extents: pages 0 and 1 are in the first memory, and pages 2 to 5 are in the second memory. One
// region begins at byte 7 of page 1 and ends at byte 7 of page 4, so that it covers parts of both. The other region is
// page 3. The exporter closes its descriptors before the traffic.
void test_region_covers_dmabuf_of_two_extents() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    Fd first_memory(make_device_memory(4 * page_bytes)), second_memory(make_device_memory(4 * page_bytes));
    const Extent extents[] = {{first_memory.get(), 2 * page_bytes, 2 * page_bytes},
                              {second_memory.get(), 0, 4 * page_bytes}};
    Fd dmabuf(export_dmabuf(extents));
    CHECK(dmabuf);
    void* const second_mapping = mmap(nullptr, 4 * page_bytes, PROT_READ, MAP_SHARED, second_memory.get(), 0);
    CHECK(second_mapping != MAP_FAILED);
    constexpr std::uint64_t two_extent_iova = 0x10007; // with the page offset 7, as its offset in the dma-buf
    ibv_mr* const two_extent_region = ibv_reg_dmabuf_mr(responder.pd, page_bytes + 7, 3 * page_bytes, two_extent_iova,
                                                        dmabuf.get(), read_write_access);
    ibv_mr* const one_extent_region =
        ibv_reg_dmabuf_mr(responder.pd, 3 * page_bytes, page_bytes, 0, dmabuf.get(), read_write_access);
    CHECK(two_extent_region != nullptr && one_extent_region != nullptr);
    dmabuf.reset();
    first_memory.reset();
    second_memory.reset();
    Buffer source(requester.pd, 3 * page_bytes), readback(requester.pd, 3 * page_bytes);
    fill_pattern(source.bytes, 3 * page_bytes);
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, two_extent_iova, two_extent_region->rkey),
                         {source.sge(0, 3 * page_bytes)}) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(has_pattern(second_mapping, 2 * page_bytes + 7, page_bytes - 7));
    CHECK(requester.post(make_request(2, IBV_WR_RDMA_READ, two_extent_iova, two_extent_region->rkey),
                         {readback.sge(0, 3 * page_bytes)}) == 0);
    requester.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(has_pattern(readback.bytes, 3 * page_bytes));
    CHECK(requester.post(make_request(3, IBV_WR_RDMA_WRITE, 5, one_extent_region->rkey), {source.sge(0, 10)}) == 0);
    requester.expect_completion(3, IBV_WC_SUCCESS);
    CHECK(std::memcmp(static_cast<char*>(second_mapping) + page_bytes + 5, source.bytes, 10) == 0);
    CHECK(ibv_dereg_mr(two_extent_region) == 0 && ibv_dereg_mr(one_extent_region) == 0);
    munmap(second_mapping, 4 * page_bytes);
}

// Drop CAP_IPC_LOCK, because RLIMIT_MEMLOCK does not limit a process with this capability.
void drop_cap_ipc_lock() {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct capabilities[2]{};
    CHECK(syscall(SYS_capget, &header, capabilities) == 0);
    capabilities[0].effective &= ~(1U << CAP_IPC_LOCK);
    CHECK(syscall(SYS_capset, &header, capabilities) == 0);
}

void test_locked_memory_limit_is_enforced() {
    drop_cap_ipc_lock();
    Endpoint endpoint;
    alignas(page_bytes) static std::uint8_t memory[16 * page_bytes];
    const auto set_soft_limit = [](std::size_t bytes) {
        const rlimit limit{bytes, 16 * page_bytes};
        CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    };
    const auto expect_failure_and_get_errno = [&](std::size_t length) {
        errno = 0;
        CHECK(ibv_reg_mr(endpoint.pd, memory, length, read_write_access) == nullptr);
        return errno;
    };
    set_soft_limit(4 * page_bytes);
    CHECK(expect_failure_and_get_errno(5 * page_bytes) == ENOMEM);
    ibv_mr* const mr = ibv_reg_mr(endpoint.pd, memory, 3 * page_bytes, read_write_access);
    CHECK(mr != nullptr);
    // The same pages count again for a second registration.
    CHECK(expect_failure_and_get_errno(2 * page_bytes) == ENOMEM);
    CHECK(ibv_dereg_mr(mr) == 0);
    // These 3 * page_bytes bytes lie in 4 pages, as many as the limit allows.
    ibv_mr* const second_mr = ibv_reg_mr(endpoint.pd, memory + 1, 3 * page_bytes, read_write_access);
    CHECK(second_mr != nullptr && ibv_dereg_mr(second_mr) == 0);
    set_soft_limit(0);
    CHECK(expect_failure_and_get_errno(1) == EPERM);
    // Device memory does not count as locked memory.
    const Fd device_memory(make_device_memory(page_bytes));
    const Extent whole_extent{device_memory.get(), 0, page_bytes};
    const Fd dmabuf(export_dmabuf({&whole_extent, 1}));
    CHECK(import_and_get_errno(endpoint.pd, 0, page_bytes, 0, dmabuf.get(), read_write_access) == 0);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_host_memory_registration_is_checked();
    test_invalid_dmabuf_imports_fail();
    test_region_covers_dmabuf_of_two_extents();
    // This test runs last, because it drops a capability of the process.
    test_locked_memory_limit_is_enforced();
    return 0;
}
