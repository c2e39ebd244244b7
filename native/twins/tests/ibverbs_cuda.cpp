// Tests of the software twin of libibverbs: memory regions in GPU memory, which are registered by address (peer memory,
// as with the module nvidia_peermem) or by a dma-buf. The first argument is the path of the CUDA driver; the default is
// libcuda.so.1. On a machine with a GPU, the same tests also run with the real driver, whose dma-bufs the CPU cannot
// map.
#include <dlfcn.h>
#include <sys/wait.h>

#include <functional>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

using ContextHandle = void*; // CUcontext
constexpr std::size_t allocation_bytes = 4UL << 20;
constexpr int handle_type_dmabuf = 1; // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

// Layouts of CUmemAllocationProp and CUmemAccessDesc: pinned memory (type 1) on device 0 (location type 1), which is
// readable and writable (flags 3).
struct AllocationProperties {
    int type = 1, handle_types = 0, location_type = 1, location_id = 0;
    void* unused = nullptr;
    std::uint8_t compression = 0, gpu_direct_rdma = 1;
    std::uint16_t usage = 0;
    std::uint32_t reserved = 0;
};
static_assert(sizeof(AllocationProperties) == 32);
struct AccessDescription {
    int location_type = 1, location_id = 0, flags = 3;
};

// The functions of the CUDA driver that the tests call, and helpers for device memory.
struct Driver {
    int (*cuInit)(unsigned);
    int (*cuDevicePrimaryCtxRetain)(ContextHandle*, int);
    int (*cuCtxSetCurrent)(ContextHandle);
    int (*cuMemAlloc_v2)(std::uint64_t*, std::size_t);
    int (*cuMemFree_v2)(std::uint64_t);
    int (*cuMemcpyHtoD_v2)(std::uint64_t, const void*, std::size_t);
    int (*cuMemcpyDtoH_v2)(void*, std::uint64_t, std::size_t);
    int (*cuMemsetD8_v2)(std::uint64_t, unsigned char, std::size_t);
    int (*cuCtxSynchronize)();
    int (*cuMemGetHandleForAddressRange)(void*, std::uint64_t, std::size_t, int, std::uint64_t);

    int (*cuMemAddressReserve)(std::uint64_t*, std::size_t, std::size_t, std::uint64_t, std::uint64_t);
    int (*cuMemAddressFree)(std::uint64_t, std::size_t);
    int (*cuMemCreate)(std::uint64_t*, std::size_t, const AllocationProperties*, std::uint64_t);
    int (*cuMemRelease)(std::uint64_t);
    int (*cuMemMap)(std::uint64_t, std::size_t, std::size_t, std::uint64_t, std::uint64_t);
    int (*cuMemUnmap)(std::uint64_t, std::size_t);
    int (*cuMemSetAccess)(std::uint64_t, std::size_t, const AccessDescription*, std::size_t);

    explicit Driver(const char* path) {
        void* const library = dlopen(path, RTLD_NOW);
        CHECK(library != nullptr);
        const auto find_symbol = [&](auto* function, const char* name) {
            *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
            CHECK(*function != nullptr);
        };
        find_symbol(&cuInit, "cuInit");
        find_symbol(&cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
        find_symbol(&cuCtxSetCurrent, "cuCtxSetCurrent");
        find_symbol(&cuMemAlloc_v2, "cuMemAlloc_v2");
        find_symbol(&cuMemFree_v2, "cuMemFree_v2");
        find_symbol(&cuMemcpyHtoD_v2, "cuMemcpyHtoD_v2");
        find_symbol(&cuMemcpyDtoH_v2, "cuMemcpyDtoH_v2");
        find_symbol(&cuMemsetD8_v2, "cuMemsetD8_v2");
        find_symbol(&cuCtxSynchronize, "cuCtxSynchronize");
        find_symbol(&cuMemGetHandleForAddressRange, "cuMemGetHandleForAddressRange");
        find_symbol(&cuMemAddressReserve, "cuMemAddressReserve");
        find_symbol(&cuMemAddressFree, "cuMemAddressFree");
        find_symbol(&cuMemCreate, "cuMemCreate");
        find_symbol(&cuMemRelease, "cuMemRelease");
        find_symbol(&cuMemMap, "cuMemMap");
        find_symbol(&cuMemUnmap, "cuMemUnmap");
        find_symbol(&cuMemSetAccess, "cuMemSetAccess");
        ContextHandle context = nullptr;
        CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    }
    [[nodiscard]] std::uint64_t allocate(std::size_t size_bytes = allocation_bytes) const {
        std::uint64_t address = 0;
        CHECK(cuMemAlloc_v2(&address, size_bytes) == 0);
        clear(address, size_bytes);
        return address;
    }
    // Set the bytes to 0. Wait for the end of the memset, because cuMemset on device memory is asynchronous, and a NIC
    // does not wait for streams.
    void clear(std::uint64_t address, std::size_t size_bytes) const {
        CHECK(cuMemsetD8_v2(address, 0, size_bytes) == 0 && cuCtxSynchronize() == 0);
    }
    [[nodiscard]] std::vector<std::uint8_t> read_memory(std::uint64_t address, std::size_t size_bytes) const {
        std::vector<std::uint8_t> bytes(size_bytes);
        CHECK(cuMemcpyDtoH_v2(bytes.data(), address, size_bytes) == 0);
        return bytes;
    }
    [[nodiscard]] int export_dmabuf(std::uint64_t address, std::size_t size_bytes = allocation_bytes) const {
        int dmabuf_fd = -1;
        CHECK(cuMemGetHandleForAddressRange(&dmabuf_fd, address, size_bytes, handle_type_dmabuf, 0) == 0 &&
              dmabuf_fd >= 0);
        return dmabuf_fd;
    }
};

void* to_pointer(std::uint64_t address) {
    return reinterpret_cast<void*>(address);
}

// Check that a write and a read at odd offsets, most with odd sizes, move the right bytes, and that the write
// changes no neighbouring byte. Then free the memory while the region is registered, and check that requests with the
// old key do not reach the next allocation.
void check_region(const Driver& driver, Endpoint* requester, std::uint64_t memory_address, ibv_mr* mr) {
    Buffer source(requester->pd, allocation_bytes), readback(requester->pd, allocation_bytes);
    fill_pattern(source.bytes, source.size_bytes);
    constexpr std::size_t write_offset = 77;
    for (const std::size_t size_bytes : {1UL, 4095UL, 65536UL, (1UL << 20) + 3}) {
        driver.clear(memory_address, allocation_bytes);
        CHECK(requester->post(make_request(1, IBV_WR_RDMA_WRITE, memory_address + write_offset, mr->rkey),
                              {source.sge(1, size_bytes)}) == 0);
        requester->expect_completion(1, IBV_WC_SUCCESS);
        const auto content = driver.read_memory(memory_address, write_offset + size_bytes + 1);
        // The bytes directly before and after the written bytes are unchanged.
        CHECK(content[write_offset - 1] == 0 && content[write_offset + size_bytes] == 0 &&
              has_pattern(content.data() + write_offset, size_bytes, 1));
        CHECK(requester->post(make_request(2, IBV_WR_RDMA_READ, memory_address + write_offset, mr->rkey),
                              {readback.sge(3, size_bytes)}) == 0);
        requester->expect_completion(2, IBV_WC_SUCCESS);
        CHECK(has_pattern(readback.bytes + 3, size_bytes, 1));
    }
    // The owner frees the memory. A later allocation at this address must not receive data sent with the old key.
    CHECK(driver.cuMemFree_v2(memory_address) == 0);
    const std::uint64_t next_address = driver.allocate();
    std::fprintf(stderr, "the next allocation %s the address\n",
                 next_address == memory_address ? "got" : "did not get");
    // As on hardware, requests with the old key still succeed, but they do not reach the next allocation.
    CHECK(requester->post(make_request(3, IBV_WR_RDMA_WRITE, memory_address + 5, mr->rkey), {source.sge(0, 1000)}) ==
          0);
    requester->expect_completion(3, IBV_WC_SUCCESS);
    CHECK(requester->post(make_request(4, IBV_WR_RDMA_READ, memory_address + 5, mr->rkey), {readback.sge(0, 1000)}) ==
          0);
    requester->expect_completion(4, IBV_WC_SUCCESS);
    CHECK(has_pattern(readback.bytes, 1000));
    const auto next_content = driver.read_memory(next_address, 4096);
    CHECK(next_content == std::vector<std::uint8_t>(4096, 0));
    CHECK(driver.cuMemFree_v2(next_address) == 0);
}

void test_device_address_is_registered_by_peer_memory(const Driver& driver) {
    Endpoint requester(0), responder(1);
    connect(&requester, &responder);
    const std::uint64_t memory_address = driver.allocate();
    ibv_mr* const mr = ibv_reg_mr(responder.pd, to_pointer(memory_address), allocation_bytes, read_write_access);
    CHECK(mr != nullptr && address_of(mr->addr) == memory_address);
    errno = 0;
    CHECK(ibv_reg_mr(responder.pd, to_pointer(memory_address), 1UL << 40, read_write_access) == nullptr &&
          errno == EFAULT);
    check_region(driver, &requester, memory_address, mr);
    CHECK(ibv_dereg_mr(mr) == 0);
}

void test_device_address_is_refused_without_peer_memory(const Driver& driver) {
    Endpoint endpoint;
    const std::uint64_t memory_address = driver.allocate();
    errno = 0;
    CHECK(ibv_reg_mr(endpoint.pd, to_pointer(memory_address), allocation_bytes, read_write_access) == nullptr &&
          errno == EFAULT);
    CHECK(driver.cuMemFree_v2(memory_address) == 0);
    // Host memory is registered as host memory even if a driver is loaded.
    const Buffer host_buffer(endpoint.pd, 4096);
}

void test_device_memory_is_registered_by_dmabuf(const Driver& driver) {
    Endpoint requester(0), responder(1);
    connect(&requester, &responder);
    const std::uint64_t memory_address = driver.allocate();
    const int dmabuf_fd = driver.export_dmabuf(memory_address);
    errno = 0;
    CHECK(ibv_reg_dmabuf_mr(responder.pd, 0, allocation_bytes + 1, memory_address, dmabuf_fd, read_write_access) ==
              nullptr &&
          errno == EINVAL);
    ibv_mr* const mr =
        ibv_reg_dmabuf_mr(responder.pd, 0, allocation_bytes, memory_address, dmabuf_fd, read_write_access);
    CHECK(mr != nullptr);
    CHECK(close(dmabuf_fd) == 0);
    check_region(driver, &requester, memory_address, mr);
    CHECK(ibv_dereg_mr(mr) == 0);
}

// One region may cover two mappings of cuMemMap, although each mapping has its own CU_POINTER_ATTRIBUTE_BUFFER_ID, by
// which the twin notices freed memory.
void test_region_covers_two_mappings(const Driver& driver, bool uses_dmabuf) {
    constexpr std::size_t mapping_bytes = 2UL << 20;
    Endpoint requester(0), responder(1);
    connect(&requester, &responder);
    std::uint64_t base = 0;
    CHECK(driver.cuMemAddressReserve(&base, 2 * mapping_bytes, 0, 0, 0) == 0);
    const auto map_new_memory = [&](std::uint64_t address) {
        const AllocationProperties properties;
        const AccessDescription access;
        std::uint64_t handle = 0;
        CHECK(driver.cuMemCreate(&handle, mapping_bytes, &properties, 0) == 0 &&
              driver.cuMemMap(address, mapping_bytes, 0, handle, 0) == 0);
        CHECK(driver.cuMemRelease(handle) == 0 && driver.cuMemSetAccess(address, mapping_bytes, &access, 1) == 0);
        driver.clear(address, mapping_bytes);
    };
    map_new_memory(base);
    map_new_memory(base + mapping_bytes);
    const std::uint64_t region_address = base + mapping_bytes / 2;
    ibv_mr* mr = nullptr;
    if (uses_dmabuf) {
        const int dmabuf_fd = driver.export_dmabuf(region_address, mapping_bytes);
        mr = ibv_reg_dmabuf_mr(responder.pd, 0, mapping_bytes, region_address, dmabuf_fd, read_write_access);
        close(dmabuf_fd);
    } else {
        mr = ibv_reg_mr(responder.pd, to_pointer(region_address), mapping_bytes, read_write_access);
    }
    CHECK(mr != nullptr);
    Buffer source(requester.pd, mapping_bytes);
    fill_pattern(source.bytes, mapping_bytes);
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, region_address, mr->rkey),
                         {source.sge(0, mapping_bytes)}) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    const auto content = driver.read_memory(base, 2 * mapping_bytes);
    CHECK(content[mapping_bytes / 2 - 1] == 0 && has_pattern(content.data() + mapping_bytes / 2, mapping_bytes) &&
          content[mapping_bytes / 2 + mapping_bytes] == 0);
    // Map other memory at the addresses of the second mapping. The region must not access it.
    CHECK(driver.cuMemUnmap(base + mapping_bytes, mapping_bytes) == 0);
    map_new_memory(base + mapping_bytes);
    CHECK(requester.post(make_request(2, IBV_WR_RDMA_WRITE, base + mapping_bytes, mr->rkey), {source.sge(0, 1000)}) ==
          0);
    requester.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(driver.read_memory(base + mapping_bytes, 1000) == std::vector<std::uint8_t>(1000, 0));
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(driver.cuMemUnmap(base, mapping_bytes) == 0 && driver.cuMemUnmap(base + mapping_bytes, mapping_bytes) == 0);
    CHECK(driver.cuMemAddressFree(base, 2 * mapping_bytes) == 0);
}

// Run a test in a child process, because a process reads GDRKIT_TWINS_PEERMEM only once. The value 1 allows peer
// memory.
void run_in_child(const char* description, const char* peermem_value, const std::function<void()>& test_body) {
    const pid_t child = fork();
    if (child == 0) {
        setenv("GDRKIT_TWINS_PEERMEM", peermem_value, 1);
        setenv("GDRKIT_TWINS_DOMAIN", ("test." + std::to_string(getpid())).c_str(), 1);
        test_body();
        std::exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    std::fprintf(stderr, "%s: %s\n", description, status == 0 ? "passed" : "failed");
    CHECK(status == 0);
}

} // namespace

int main(int argument_count, char** arguments) {
    const char* const driver_path = argument_count > 1 ? arguments[1] : "libcuda.so.1";
    run_in_child("without peer memory", "0",
                 [=] { test_device_address_is_refused_without_peer_memory(Driver(driver_path)); });
    run_in_child("peer memory", "1", [=] { test_device_address_is_registered_by_peer_memory(Driver(driver_path)); });
    run_in_child("dma-buf", "0", [=] { test_device_memory_is_registered_by_dmabuf(Driver(driver_path)); });
    run_in_child("two mappings by peer memory", "1",
                 [=] { test_region_covers_two_mappings(Driver(driver_path), false); });
    run_in_child("two mappings by dma-buf", "0", [=] { test_region_covers_two_mappings(Driver(driver_path), true); });
    return 0;
}
