// Tests of registration: valid and refused arguments with their errnos, and dma-bufs.
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

constexpr std::size_t page = 4096;

void test_host_memory() {
    Endpoint a;
    alignas(page) static std::uint8_t memory[4 * page];
    const auto fails = [&](void* address, std::size_t length, std::uint64_t iova, unsigned access, int error) {
        errno = 0;
        CHECK(ibv_reg_mr_iova2(a.pd, address, length, iova, access) == nullptr && errno == error);
    };
    const std::uint64_t at = number_of(memory);
    fails(memory, page, at + 1, all_access, EINVAL);
    fails(memory, 0, at, all_access, EINVAL);
    fails(memory, page, at, IBV_ACCESS_REMOTE_WRITE, EINVAL);
    fails(memory, page, at, IBV_ACCESS_REMOTE_ATOMIC, EINVAL);
    fails(memory, page, at, 1U << 15, EINVAL);
    fails(memory, page, at, IBV_ACCESS_ON_DEMAND, EINVAL);
    fails(memory, ~0UL - page, at, all_access, EINVAL);
    fails(nullptr, page, 0, all_access, EFAULT);
    void* const hole = mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    auto* const bytes = static_cast<char*>(hole);
    CHECK(munmap(bytes + page, page) == 0);
    fails(hole, 3 * page, number_of(hole), all_access, EFAULT);
    CHECK(mprotect(bytes + 2 * page, page, PROT_NONE) == 0);
    fails(bytes + 2 * page, 1, number_of(bytes + 2 * page), 0, EFAULT);
    CHECK(mprotect(bytes + 2 * page, page, PROT_READ) == 0);
    fails(bytes + 2 * page, 1, number_of(bytes + 2 * page), IBV_ACCESS_LOCAL_WRITE, EFAULT);
    ibv_mr* const readable_only = ibv_reg_mr(a.pd, bytes + 2 * page, page, IBV_ACCESS_REMOTE_READ);
    CHECK(readable_only != nullptr && ibv_dereg_mr(readable_only) == 0);

    std::set<std::uint32_t> keys;
    for (int count = 0; count < 200; ++count) {
        ibv_mr* const mr = ibv_reg_mr(a.pd, memory + 5, 100, all_access | IBV_ACCESS_RELAXED_ORDERING);
        CHECK(mr != nullptr && mr->addr == memory + 5 && mr->length == 100 && mr->pd == a.pd);
        CHECK(keys.insert(mr->lkey).second && keys.insert(mr->rkey).second);
        CHECK(ibv_dereg_mr(mr) == 0);
    }
}

int import_errno(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int fd, int access) {
    errno = 0;
    ibv_mr* const mr = ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access);
    const int error = errno;
    CHECK(mr == nullptr || ibv_dereg_mr(mr) == 0);
    return mr == nullptr ? error : 0;
}

// The checks are in the kernel's order: an earlier one hides later ones.
void test_dmabuf_errors() {
    Endpoint a;
    const Fd memory(make_device_memory(16 * page));
    const Extent whole_extent{memory.get(), 0, 16 * page};
    const Fd dmabuf(export_dmabuf({&whole_extent, 1}));
    CHECK(memory && dmabuf);
    const Fd plain_memfd(memfd_create("plain", MFD_CLOEXEC));
    CHECK(ftruncate(plain_memfd.get(), 16 * page) == 0);
    const Fd null(open("/dev/null", O_RDWR | O_CLOEXEC));
    const int fd = dmabuf.get();
    constexpr int access = all_access;

    CHECK(import_errno(a.pd, 0, page, 0, fd, access) == 0);
    CHECK(import_errno(a.pd, 0, page, 0x7f0000000000, fd, all_access_atomic | IBV_ACCESS_RELAXED_ORDERING) == 0);
    CHECK(import_errno(a.pd, 3, page, page + 3, fd, access) == 0);
    CHECK(import_errno(a.pd, 0, page, 1, -1, access) == EINVAL);
    CHECK(import_errno(a.pd, 0, page, 0, -1, access | IBV_ACCESS_ON_DEMAND) == EINVAL);
    CHECK(import_errno(a.pd, 0, page, 0, -1, access | IBV_ACCESS_MW_BIND) == EINVAL);
    CHECK(import_errno(a.pd, 0, page, 0, -1, IBV_ACCESS_REMOTE_WRITE) == EINVAL);
    CHECK(import_errno(a.pd, ~0UL - page + 1, page, 0, -1, access) == EINVAL);
    CHECK(import_errno(a.pd, 0, page, 0, -1, access) == EBADF);
    CHECK(import_errno(a.pd, 0, 0, 0, -1, access) == EBADF);
    CHECK(import_errno(a.pd, 0, 1UL << 40, 0, -1, access) == EBADF);
    CHECK(import_errno(a.pd, 0, page, 0, plain_memfd.get(), access) == EINVAL);
    CHECK(import_errno(a.pd, 0, page, 0, null.get(), access) == EINVAL);
    CHECK(import_errno(a.pd, 0, 16 * page + 1, 0, fd, access) == EINVAL);
    CHECK(import_errno(a.pd, 16 * page, 1, 0, fd, access) == EINVAL);
    CHECK(import_errno(a.pd, 0, 0, 0, fd, access) == EINVAL);
    ibv_mr* const mr = ibv_reg_dmabuf_mr(a.pd, page + 8, 100, 0x5000008, fd, access);
    CHECK(mr != nullptr && number_of(mr->addr) == page + 8 && mr->length == 100);
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(mmap(nullptr, page, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED);
}

// A dma-buf of two extents of different memory, of which the region covers parts. The exporter frees its memory first.
void test_dmabuf_traffic() {
    Endpoint a, b;
    connect(&a, &b);
    Fd first(make_device_memory(4 * page)), second(make_device_memory(4 * page));
    const Extent extents[] = {{first.get(), 2 * page, 2 * page}, {second.get(), 0, 4 * page}};
    Fd dmabuf(export_dmabuf(extents));
    CHECK(dmabuf);
    void* const view = mmap(nullptr, 4 * page, PROT_READ, MAP_SHARED, second.get(), 0);
    CHECK(view != MAP_FAILED);
    ibv_mr* const both = ibv_reg_dmabuf_mr(b.pd, page + 7, 3 * page, 0x10007, dmabuf.get(), all_access);
    ibv_mr* const later = ibv_reg_dmabuf_mr(b.pd, 3 * page, page, 0, dmabuf.get(), all_access);
    CHECK(both != nullptr && later != nullptr);
    dmabuf.reset();
    first.reset();
    second.reset();
    Buffer from(a.pd, 3 * page), back(a.pd, 3 * page);
    fill_pattern(from.bytes, 3 * page);
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, 0x10007, both->rkey), {from.part(0, 3 * page)}) == 0);
    a.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(has_pattern(view, 2 * page + 7, page - 7));
    CHECK(a.post(request(2, IBV_WR_RDMA_READ, 0x10007, both->rkey), {back.part(0, 3 * page)}) == 0);
    a.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(has_pattern(back.bytes, 3 * page));
    CHECK(a.post(request(3, IBV_WR_RDMA_WRITE, 5, later->rkey), {from.part(0, 10)}) == 0);
    a.expect_completion(3, IBV_WC_SUCCESS);
    CHECK(std::memcmp(static_cast<char*>(view) + page + 5, from.bytes, 10) == 0);
    CHECK(ibv_dereg_mr(both) == 0 && ibv_dereg_mr(later) == 0);
    munmap(view, 4 * page);
}

void drop_cap_ipc_lock() {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2]{};
    CHECK(syscall(SYS_capget, &header, data) == 0);
    data[0].effective &= ~(1U << CAP_IPC_LOCK);
    CHECK(syscall(SYS_capset, &header, data) == 0);
}

void test_locked_memory_limit() {
    drop_cap_ipc_lock();
    Endpoint a;
    alignas(page) static std::uint8_t memory[16 * page];
    const auto limit = [](std::size_t bytes) {
        const rlimit value{bytes, 16 * page};
        CHECK(setrlimit(RLIMIT_MEMLOCK, &value) == 0);
    };
    const auto errno_of = [&](std::size_t length) {
        errno = 0;
        CHECK(ibv_reg_mr(a.pd, memory, length, all_access) == nullptr);
        return errno;
    };
    limit(4 * page);
    CHECK(errno_of(5 * page) == ENOMEM);
    ibv_mr* const mr = ibv_reg_mr(a.pd, memory, 3 * page, all_access);
    CHECK(mr != nullptr);
    // Registering the same pages again counts them again.
    CHECK(errno_of(2 * page) == ENOMEM);
    CHECK(ibv_dereg_mr(mr) == 0);
    ibv_mr* const other = ibv_reg_mr(a.pd, memory + 1, 3 * page, all_access);
    CHECK(other != nullptr && ibv_dereg_mr(other) == 0);
    limit(0);
    CHECK(errno_of(1) == EPERM);
    // Device memory does not count as locked memory.
    const Fd device(make_device_memory(page));
    const Extent whole_extent{device.get(), 0, page};
    const Fd dmabuf(export_dmabuf({&whole_extent, 1}));
    CHECK(import_errno(a.pd, 0, page, 0, dmabuf.get(), all_access) == 0);
}

} // namespace

int main() {
    use_own_domain();
    test_host_memory();
    test_dmabuf_errors();
    test_dmabuf_traffic();
    // Runs last, because it drops a capability of the process.
    test_locked_memory_limit();
    return 0;
}
