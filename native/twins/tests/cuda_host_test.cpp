// Host memory that the device reaches: pinned, registered, managed.
#include <sys/mman.h>

#include <cstring>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

void pinned() {
    void* host = nullptr;
    WORKS("cuMemHostAlloc", &host, u64{5000}, 0U);
    std::memset(host, 3, 5000);
    u64 device = 0;
    WORKS("cuMemHostGetDevicePointer_v2", &device, host, 0U);
    CHECK(device == reinterpret_cast<u64>(host));
    unsigned flags = 0;
    WORKS("cuMemHostGetFlags", &flags, host);
    CHECK(flags == host_alloc_devicemap);
    const u64 memory = allocate(5000);
    WORKS("cuMemcpyHtoD_v2", memory, static_cast<const void*>(host), u64{5000});
    CHECK(read_device(memory, 5000) == std::vector<unsigned char>(5000, 3));
    WORKS("cuMemsetD8_v2", device, static_cast<unsigned char>(4), u64{5000}); // of host memory: done when it returns
    CHECK(static_cast<unsigned char*>(host)[4999] == 4);
    unsigned type = 0;
    WORKS("cuPointerGetAttribute", static_cast<void*>(&type), static_cast<int>(pointer_memory_type), device);
    CHECK(type == memory_host);
    int fd = -1;
    ANSWERS(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), device, u64{4096},
            range_handle_dmabuf, u64{0});
    ANSWERS(invalid_value, "cuMemFree_v2", device);
    ANSWERS(invalid_value, "cuMemFreeHost", static_cast<void*>(static_cast<char*>(host) + 64));
    WORKS("cuMemFreeHost", host);
    WORKS("cuMemAllocHost_v2", &host, u64{100});
    WORKS("cuMemFreeHost", host);
    WORKS("cuMemHostAlloc", &host, u64{0}, 0U);
    CHECK(host == nullptr);
    ANSWERS(invalid_value, "cuMemHostAlloc", &host, u64{10}, 8U);
    WORKS("cuMemFree_v2", memory);
}

void registered() {
    std::vector<unsigned char> bytes(64 << 10, 5);
    void* const host = bytes.data();
    void* const inside = bytes.data() + 4096;
    WORKS("cuMemHostRegister_v2", host, u64{8192}, 0U);
    ANSWERS(host_memory_already_registered, "cuMemHostRegister_v2", inside, u64{8192}, 0U);
    u64 device = 0;
    WORKS("cuMemHostGetDevicePointer_v2", &device, inside, 0U);
    CHECK(device == reinterpret_cast<u64>(inside));
    ANSWERS(invalid_value, "cuMemHostUnregister", inside);
    WORKS("cuMemHostUnregister", host);
    ANSWERS(host_memory_not_registered, "cuMemHostUnregister", host);
    ANSWERS(invalid_value, "cuMemHostGetDevicePointer_v2", &device, host, 0U);
    ANSWERS(invalid_value, "cuMemHostRegister_v2", host, u64{0}, 0U);
    ANSWERS(invalid_value, "cuMemHostRegister_v2", host, u64{4096}, 0x10U);
    void* const nothing = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(nothing, 4096);
    ANSWERS(invalid_value, "cuMemHostRegister_v2", nothing, u64{4096}, 0U);
    // Memory that may only be read is no target of a copy.
    void* const constant = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    WORKS("cuMemHostRegister_v2", constant, u64{4096}, static_cast<unsigned>(host_register_read_only));
    const u64 memory = allocate(4096);
    WORKS("cuMemcpyHtoD_v2", memory, static_cast<const void*>(constant), u64{4096});
    ANSWERS(invalid_value, "cuMemcpyDtoH_v2", constant, memory, u64{4096});
    WORKS("cuMemHostUnregister", constant);
    WORKS("cuMemFree_v2", memory);
    munmap(constant, 4096);
    ANSWERS(invalid_value, "cuMemHostRegister_v2", reinterpret_cast<void*>(allocate(4096)), u64{4096}, 0U);
}

void managed() {
    u64 pointer = 0;
    ANSWERS(invalid_value, "cuMemAllocManaged", &pointer, u64{100}, 4U);
    WORKS("cuMemAllocManaged", &pointer, u64{100}, 1U);
    auto* const host = reinterpret_cast<unsigned char*>(pointer);
    host[99] = 7; // the CPU reaches managed memory
    CHECK(read_device(pointer, 100)[99] == 7);
    unsigned is_managed = 0;
    WORKS("cuPointerGetAttribute", static_cast<void*>(&is_managed), static_cast<int>(pointer_is_managed), pointer);
    CHECK(is_managed == 1);
    int fd = -1;
    ANSWERS(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{4096},
            range_handle_dmabuf, u64{0});
    IpcMemHandle handle{};
    ANSWERS(invalid_value, "cuIpcGetMemHandle", &handle, pointer);
    WORKS("cuMemFree_v2", pointer);
}

} // namespace

int main() {
    begin();
    pinned();
    registered();
    managed();
}
