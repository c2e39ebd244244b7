// Device memory: allocation, bounds, copies, attributes, reuse of addresses, and what the CPU may not do with it.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cuda_driver.hpp"
#include "model/rendezvous.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

void cpu_access_faults() {
    for (const bool write : {false, true}) {
        const int status = status_of_child([&] {
            begin();
            const u64 pointer = allocate(4096);
            char bytes[16] = {};
            volatile auto* const at = reinterpret_cast<char*>(pointer);
            if (write) {
                *at = 1;
            } else {
                bytes[0] = *at;
            }
            _exit(bytes[0]);
        });
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
}

// The kernel itself, which looks past the protection here as it does when it pins memory, finds nothing either.
void the_kernel_finds_no_page() {
    const u64 pointer = allocate(4096);
    const Fd memory(open("/proc/self/mem", O_RDWR | O_CLOEXEC));
    CHECK(memory);
    char byte = 0;
    CHECK(pread(memory.get(), &byte, 1, static_cast<off_t>(pointer)) == -1 && errno == EIO);
    CHECK(pwrite(memory.get(), &byte, 1, static_cast<off_t>(pointer)) == -1 && errno == EIO);
    WORKS("cuMemFree_v2", pointer);
}

void second_free_aborts() {
    const int status = status_of_child([] {
        begin();
        const u64 pointer = allocate(4096);
        cu("cuMemFree_v2", pointer);
        cu("cuMemFree_v2", pointer);
    });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void bounds_are_by_the_byte() {
    const u64 pointer = allocate(100);
    const auto bytes = pattern(200, 1);
    const auto* const from = static_cast<const void*>(bytes.data());
    WORKS("cuMemcpyHtoD_v2", pointer, from, u64{100});
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", pointer, from, u64{101});
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", pointer + 99, from, u64{2});
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", pointer + 100, from, u64{1});
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", reinterpret_cast<u64>(from), from, u64{1});
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", pointer, static_cast<const void*>(nullptr), u64{1});
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", pointer, from, ~u64{0});
    WORKS("cuMemcpyHtoD_v2", u64{0x10}, from, u64{0});
    ANSWERS(invalid_value, "cuMemsetD8_v2", pointer, static_cast<unsigned char>(1), u64{101});
    ANSWERS(invalid_value, "cuMemsetD16_v2", pointer + 1, static_cast<unsigned short>(1), u64{2});
    ANSWERS(invalid_value, "cuMemsetD32_v2", pointer + 2, 1U, u64{2});
    u64 base = 0, length = 0;
    WORKS("cuMemGetAddressRange_v2", &base, &length, pointer + 99);
    CHECK(base == pointer && length == 100);
    ANSWERS(not_found, "cuMemGetAddressRange_v2", &base, &length, pointer + 100);
    CHECK(read_device(pointer, 100) == std::vector(bytes.begin(), bytes.begin() + 100));
    WORKS("cuMemFree_v2", pointer);
    ANSWERS(invalid_value, "cuMemcpyHtoD_v2", pointer, from, u64{1});
    ANSWERS(invalid_value, "cuMemcpyDtoH_v2", const_cast<void*>(from), pointer, u64{1});
}

void copies_and_fills() {
    for (const u64 size : {u64{1}, u64{4095}, u64{65536}, u64{(1 << 20) + 3}}) {
        const u64 first = allocate(size + 7), second = allocate(size + 7);
        const auto bytes = pattern(size, 3);
        write_device(first + 5, bytes);
        WORKS("cuMemcpyDtoD_v2", second + 3, first + 5, size);
        CHECK(read_device(second + 3, size) == bytes);
        WORKS("cuMemcpy", first, second + 3, size);
        CHECK(read_device(first, size) == bytes);
        WORKS("cuMemFree_v2", first);
        WORKS("cuMemFree_v2", second);
    }
}

void fills() {
    const u64 pointer = allocate(64);
    WORKS("cuMemsetD8_v2", pointer, static_cast<unsigned char>(0xab), u64{64});
    WORKS("cuMemsetD16_v2", pointer + 16, static_cast<unsigned short>(0x1234), u64{8});
    WORKS("cuMemsetD32_v2", pointer + 32, 0x89abcdefU, u64{4});
    const auto bytes = read_device(pointer, 64);
    CHECK(bytes[0] == 0xab && bytes[15] == 0xab && bytes[16] == 0x34 && bytes[17] == 0x12 && bytes[31] == 0x12);
    CHECK(bytes[32] == 0xef && bytes[35] == 0x89 && bytes[47] == 0x89 && bytes[48] == 0xab);
    WORKS("cuMemFree_v2", pointer);
}

void addresses_come_back_with_new_ids() {
    const u64 first = allocate(1 << 21);
    const u64 first_id = buffer_id(first);
    WORKS("cuMemFree_v2", first);
    const u64 second = allocate(1 << 21);
    CHECK(second == first && buffer_id(second) > first_id);
    // Small ones are packed: only the first begins a page.
    const u64 small = allocate(100), next = allocate(300);
    CHECK(small % 512 == 0 && next % 512 == 0 && (small % 4096 != 0 || next % 4096 != 0));
    WORKS("cuMemFree_v2", small);
    CHECK(allocate(200) == small);
    for (const u64 pointer : {second, small, next}) {
        WORKS("cuMemFree_v2", pointer);
    }
    WORKS("cuMemFree_v2", u64{0});
    ANSWERS(invalid_value, "cuMemFree_v2", second + 64);
}

void memory_is_counted() {
    const u64 before = free_memory();
    u64 pointer = 0;
    ANSWERS(out_of_memory, "cuMemAlloc_v2", &pointer, (u64{8} << 30) + 1);
    ANSWERS(out_of_memory, "cuMemAlloc_v2", &pointer, ~u64{0} - 5);
    ANSWERS(invalid_value, "cuMemAlloc_v2", &pointer, u64{0});
    const u64 large = allocate(u64{6} << 30); // the pages come when they are written
    CHECK(before - free_memory() == u64{6} << 30);
    ANSWERS(out_of_memory, "cuMemAlloc_v2", &pointer, u64{3} << 30);
    WORKS("cuMemFree_v2", large);
    CHECK(free_memory() == before);
    u64 pitch = 0;
    WORKS("cuMemAllocPitch_v2", &pointer, &pitch, u64{1000}, u64{10}, 4U);
    CHECK(pitch == 1024);
    WORKS("cuMemFree_v2", pointer);
    ANSWERS(out_of_memory, "cuMemAllocPitch_v2", &pointer, &pitch, u64{1} << 40, u64{1} << 40, 4U);
}

template <typename Value> Value attribute(u64 pointer, int number) {
    Value value{};
    WORKS("cuPointerGetAttribute", static_cast<void*>(&value), number, pointer);
    return value;
}

void pointer_attributes(Handle context) {
    const u64 pointer = allocate(5000);
    CHECK(attribute<u64>(pointer, pointer_context) == context);
    CHECK(attribute<unsigned>(pointer + 7, pointer_memory_type) == memory_device);
    CHECK(attribute<u64>(pointer + 7, pointer_device_pointer) == pointer + 7);
    CHECK(attribute<unsigned>(pointer, pointer_is_managed) == 0 &&
          attribute<int>(pointer, pointer_device_ordinal) == 0);
    CHECK(attribute<unsigned>(pointer, pointer_is_legacy_ipc_capable) == 1);
    CHECK(attribute<u64>(pointer + 9, pointer_range_start) == pointer);
    CHECK(attribute<u64>(pointer, pointer_range_size) == 5000 && attribute<unsigned>(pointer, pointer_mapped) == 1);
    CHECK(attribute<unsigned>(pointer, pointer_is_gpu_direct_rdma_capable) == 1);
    CHECK(attribute<unsigned>(pointer, pointer_access_flags) == access_read_write);
    CHECK(attribute<unsigned>(pointer, pointer_sync_memops) == 0);
    const unsigned on = 1;
    WORKS("cuPointerSetAttribute", static_cast<const void*>(&on), static_cast<int>(pointer_sync_memops), pointer + 64);
    CHECK(attribute<unsigned>(pointer, pointer_sync_memops) == 1);
    u64 value = 0;
    void* const where = &value;
    ANSWERS(invalid_value, "cuPointerGetAttribute", where, static_cast<int>(pointer_host_pointer), pointer);
    ANSWERS(invalid_value, "cuPointerGetAttribute", where, 99, pointer);
    ANSWERS(invalid_value, "cuPointerGetAttribute", where, static_cast<int>(pointer_buffer_id), pointer + 5000);
    ANSWERS(invalid_value, "cuPointerGetAttribute", where, static_cast<int>(pointer_buffer_id),
            reinterpret_cast<u64>(where));
    // Several at once answer zeroes for plain host memory.
    unsigned type = 7;
    int ordinal = 7;
    u64 id = 7;
    const int numbers[] = {pointer_memory_type, pointer_device_ordinal, pointer_buffer_id};
    void* places[] = {&type, &ordinal, &id};
    WORKS("cuPointerGetAttributes", 3U, numbers, places, reinterpret_cast<u64>(where));
    CHECK(type == 0 && ordinal == -2 && id == 0);
    WORKS("cuPointerGetAttributes", 3U, numbers, places, pointer);
    CHECK(type == memory_device && ordinal == 0 && id == buffer_id(pointer));
    WORKS("cuMemFree_v2", pointer);
}

void other_device() {
    const u64 on_first = allocate(100);
    Handle first = 0, second = 0;
    WORKS("cuCtxGetCurrent", &first);
    WORKS("cuDevicePrimaryCtxRetain", &second, 1);
    WORKS("cuCtxPushCurrent_v2", second);
    const u64 before = free_memory();
    const u64 on_second = allocate(100);
    CHECK(free_memory() < before && attribute<int>(on_second, pointer_device_ordinal) == 1);
    const auto bytes = pattern(100, 9);
    write_device(on_first, bytes);
    WORKS("cuMemcpyPeer", on_second, second, on_first, first, u64{100});
    CHECK(read_device(on_second, 100) == bytes);
    ANSWERS(invalid_context, "cuMemcpyPeer", on_second, Handle{5}, on_first, first, u64{100});
    WORKS("cuMemFree_v2", on_second);
    WORKS("cuMemFree_v2", on_first);
    WORKS("cuCtxPopCurrent_v2", &second);
    WORKS("cuDevicePrimaryCtxRelease_v2", 1);
}

} // namespace

int main() {
    cpu_access_faults();
    second_free_aborts();
    const Handle context = begin();
    the_kernel_finds_no_page();
    bounds_are_by_the_byte();
    copies_and_fills();
    fills();
    addresses_come_back_with_new_ids();
    memory_is_counted();
    pointer_attributes(context);
    other_device();
}
