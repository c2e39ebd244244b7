// Tests of the software twin of libcuda: host memory that the device can access (pinned, registered and managed
// memory).
#include <sys/mman.h>

#include <cstring>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

void test_pinned_memory_is_mapped_for_device() {
    void* host_memory = nullptr;
    EXPECT_SUCCESS("cuMemHostAlloc", &host_memory, u64{5000}, 0U);
    std::memset(host_memory, 3, 5000);
    u64 device_address = 0;
    EXPECT_SUCCESS("cuMemHostGetDevicePointer_v2", &device_address, host_memory, 0U);
    CHECK(device_address == reinterpret_cast<u64>(host_memory));
    unsigned flags = 0;
    EXPECT_SUCCESS("cuMemHostGetFlags", &flags, host_memory);
    CHECK(flags == host_alloc_devicemap);
    const u64 device_memory = allocate(5000);
    EXPECT_SUCCESS("cuMemcpyHtoD_v2", device_memory, static_cast<const void*>(host_memory), u64{5000});
    CHECK(read_device(device_memory, 5000) == std::vector<unsigned char>(5000, 3));
    // A memset of host memory is done when the call returns.
    EXPECT_SUCCESS("cuMemsetD8_v2", device_address, static_cast<unsigned char>(4), u64{5000});
    CHECK(static_cast<unsigned char*>(host_memory)[4999] == 4);
    unsigned memory_type = 0;
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&memory_type), static_cast<int>(pointer_memory_type),
                   device_address);
    CHECK(memory_type == memory_host);
    // Host memory cannot be exported as a dma-buf. Only cuMemFreeHost frees it, and only by the address of its start.
    int fd = -1;
    EXPECT_RESULT(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), device_address, u64{4096},
                  range_handle_dmabuf, u64{0});
    EXPECT_RESULT(invalid_value, "cuMemFree_v2", device_address);
    EXPECT_RESULT(invalid_value, "cuMemFreeHost", static_cast<void*>(static_cast<char*>(host_memory) + 64));
    EXPECT_SUCCESS("cuMemFreeHost", host_memory);
    EXPECT_SUCCESS("cuMemAllocHost_v2", &host_memory, u64{100});
    EXPECT_SUCCESS("cuMemFreeHost", host_memory);
    EXPECT_SUCCESS("cuMemHostAlloc", &host_memory, u64{0}, 0U);
    CHECK(host_memory == nullptr);
    EXPECT_RESULT(invalid_value, "cuMemHostAlloc", &host_memory, u64{10}, 8U); // 8 is not a flag
    EXPECT_SUCCESS("cuMemFree_v2", device_memory);
}

void test_registered_memory_can_be_copied() {
    std::vector<unsigned char> bytes(64 << 10, 5);
    void* const host_memory = bytes.data();
    void* const inner_address = bytes.data() + 4096;
    EXPECT_SUCCESS("cuMemHostRegister_v2", host_memory, u64{8192}, 0U);
    EXPECT_RESULT(host_memory_already_registered, "cuMemHostRegister_v2", inner_address, u64{8192}, 0U);
    u64 device_address = 0;
    EXPECT_SUCCESS("cuMemHostGetDevicePointer_v2", &device_address, inner_address, 0U);
    CHECK(device_address == reinterpret_cast<u64>(inner_address));
    EXPECT_RESULT(invalid_value, "cuMemHostUnregister", inner_address);
    EXPECT_SUCCESS("cuMemHostUnregister", host_memory);
    EXPECT_RESULT(host_memory_not_registered, "cuMemHostUnregister", host_memory);
    EXPECT_RESULT(invalid_value, "cuMemHostGetDevicePointer_v2", &device_address, host_memory, 0U);
    EXPECT_RESULT(invalid_value, "cuMemHostRegister_v2", host_memory, u64{0}, 0U);
    EXPECT_RESULT(invalid_value, "cuMemHostRegister_v2", host_memory, u64{4096}, 0x10U); // 0x10 is not a flag
    void* const unmapped_memory = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(unmapped_memory, 4096);
    EXPECT_RESULT(invalid_value, "cuMemHostRegister_v2", unmapped_memory, u64{4096}, 0U);
    // Read-only memory cannot be the destination of a copy.
    void* const read_only_memory = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_SUCCESS("cuMemHostRegister_v2", read_only_memory, u64{4096}, static_cast<unsigned>(host_register_read_only));
    const u64 device_memory = allocate(4096);
    EXPECT_SUCCESS("cuMemcpyHtoD_v2", device_memory, static_cast<const void*>(read_only_memory), u64{4096});
    EXPECT_RESULT(invalid_value, "cuMemcpyDtoH_v2", read_only_memory, device_memory, u64{4096});
    EXPECT_SUCCESS("cuMemHostUnregister", read_only_memory);
    EXPECT_SUCCESS("cuMemFree_v2", device_memory);
    munmap(read_only_memory, 4096);
    // Device memory cannot be registered as host memory.
    EXPECT_RESULT(invalid_value, "cuMemHostRegister_v2", reinterpret_cast<void*>(allocate(4096)), u64{4096}, 0U);
}

void test_managed_memory_is_accessible_by_cpu() {
    u64 pointer = 0;
    EXPECT_RESULT(invalid_value, "cuMemAllocManaged", &pointer, u64{100}, unsigned{attach_single});
    EXPECT_SUCCESS("cuMemAllocManaged", &pointer, u64{100}, unsigned{attach_global});
    auto* const host_memory = reinterpret_cast<unsigned char*>(pointer);
    host_memory[99] = 7;
    CHECK(read_device(pointer, 100)[99] == 7);
    unsigned is_managed = 0;
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&is_managed), static_cast<int>(pointer_is_managed),
                   pointer);
    CHECK(is_managed == 1);
    // Managed memory cannot be exported as a dma-buf, or shared by CUDA IPC.
    int fd = -1;
    EXPECT_RESULT(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{4096},
                  range_handle_dmabuf, u64{0});
    IpcHandle handle{};
    EXPECT_RESULT(invalid_value, "cuIpcGetMemHandle", &handle, pointer);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
}

} // namespace

int main() {
    use_primary_context();
    test_pinned_memory_is_mapped_for_device();
    test_registered_memory_can_be_copied();
    test_managed_memory_is_accessible_by_cpu();
}
