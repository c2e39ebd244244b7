// Tests of the software twin of libcuda: allocation, bounds, copies, attributes, address reuse and CPU access of device
// memory.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cuda_driver.hpp"
#include "model/sockets.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

void test_cpu_access_faults() {
    for (const bool is_write : {false, true}) {
        const int status = run_in_child([&] {
            init_device();
            const u64 pointer = allocate(4096);
            char bytes[16] = {};
            volatile auto* const device_byte = reinterpret_cast<char*>(pointer);
            if (is_write) {
                *device_byte = 1;
            } else {
                bytes[0] = *device_byte;
            }
            _exit(bytes[0]);
        });
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
}

// Even the kernel, which ignores PROT_NONE when it pins memory, finds no pages at a device address.
void test_kernel_cannot_pin() {
    const u64 pointer = allocate(4096);
    const Fd memory(open("/proc/self/mem", O_RDWR | O_CLOEXEC));
    CHECK(memory);
    char byte = 0;
    CHECK(pread(memory.get(), &byte, 1, static_cast<off_t>(pointer)) == -1 && errno == EIO);
    CHECK(pwrite(memory.get(), &byte, 1, static_cast<off_t>(pointer)) == -1 && errno == EIO);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
}

void test_second_free_aborts() {
    const int status = run_in_child([] {
        init_device();
        const u64 pointer = allocate(4096);
        call_driver("cuMemFree_v2", pointer);
        call_driver("cuMemFree_v2", pointer);
    });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void test_bounds_are_exact() {
    const u64 pointer = allocate(100);
    const auto bytes = make_pattern(200, 1);
    const auto* const from = static_cast<const void*>(bytes.data());
    EXPECT_SUCCESS("cuMemcpyHtoD_v2", pointer, from, u64{100});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, from, u64{101});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer + 99, from, u64{2});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer + 100, from, u64{1});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", reinterpret_cast<u64>(from), from, u64{1});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, static_cast<const void*>(nullptr), u64{1});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, from, ~u64{0});
    EXPECT_SUCCESS("cuMemcpyHtoD_v2", u64{0x10}, from, u64{0});
    EXPECT_RESULT(invalid_value, "cuMemsetD8_v2", pointer, static_cast<unsigned char>(1), u64{101});
    EXPECT_RESULT(invalid_value, "cuMemsetD16_v2", pointer + 1, static_cast<unsigned short>(1), u64{2});
    EXPECT_RESULT(invalid_value, "cuMemsetD32_v2", pointer + 2, 1U, u64{2});
    u64 base = 0, length = 0;
    EXPECT_SUCCESS("cuMemGetAddressRange_v2", &base, &length, pointer + 99);
    CHECK(base == pointer && length == 100);
    EXPECT_RESULT(not_found, "cuMemGetAddressRange_v2", &base, &length, pointer + 100);
    CHECK(read_device(pointer, 100) == std::vector(bytes.begin(), bytes.begin() + 100));
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, from, u64{1});
    EXPECT_RESULT(invalid_value, "cuMemcpyDtoH_v2", const_cast<void*>(from), pointer, u64{1});
}

void test_copies_at_odd_offsets_are_exact() {
    for (const u64 size : {u64{1}, u64{4095}, u64{65536}, u64{(1 << 20) + 3}}) {
        const u64 first = allocate(size + 7), second = allocate(size + 7);
        const auto bytes = make_pattern(size, 3);
        write_device(first + 5, bytes);
        EXPECT_SUCCESS("cuMemcpyDtoD_v2", second + 3, first + 5, size);
        CHECK(read_device(second + 3, size) == bytes);
        EXPECT_SUCCESS("cuMemcpy", first, second + 3, size);
        CHECK(read_device(first, size) == bytes);
        EXPECT_SUCCESS("cuMemFree_v2", first);
        EXPECT_SUCCESS("cuMemFree_v2", second);
    }
}

void test_memset_writes_values_of_each_width() {
    const u64 pointer = allocate(64);
    EXPECT_SUCCESS("cuMemsetD8_v2", pointer, static_cast<unsigned char>(0xab), u64{64});
    EXPECT_SUCCESS("cuMemsetD16_v2", pointer + 16, static_cast<unsigned short>(0x1234), u64{8});
    EXPECT_SUCCESS("cuMemsetD32_v2", pointer + 32, 0x89abcdefU, u64{4});
    const auto bytes = read_device(pointer, 64);
    CHECK(bytes[0] == 0xab && bytes[15] == 0xab && bytes[16] == 0x34 && bytes[17] == 0x12 && bytes[31] == 0x12);
    CHECK(bytes[32] == 0xef && bytes[35] == 0x89 && bytes[47] == 0x89 && bytes[48] == 0xab);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
}

void test_reused_address_has_new_id() {
    const u64 first = allocate(1 << 21);
    const u64 first_id = query_buffer_id(first);
    EXPECT_SUCCESS("cuMemFree_v2", first);
    const u64 second = allocate(1 << 21);
    CHECK(second == first && query_buffer_id(second) > first_id);
    // Small allocations are packed, so at most one of two is page-aligned.
    const u64 first_small = allocate(100), second_small = allocate(300);
    CHECK(first_small % 512 == 0 && second_small % 512 == 0 && (first_small % 4096 != 0 || second_small % 4096 != 0));
    EXPECT_SUCCESS("cuMemFree_v2", first_small);
    CHECK(allocate(200) == first_small);
    for (const u64 pointer : {second, first_small, second_small}) {
        EXPECT_SUCCESS("cuMemFree_v2", pointer);
    }
    EXPECT_SUCCESS("cuMemFree_v2", u64{0});
    EXPECT_RESULT(invalid_value, "cuMemFree_v2", second + 64);
}

void test_memory_usage_is_counted() {
    const u64 free_before = query_free_memory();
    u64 pointer = 0;
    EXPECT_RESULT(out_of_memory, "cuMemAlloc_v2", &pointer, (u64{8} << 30) + 1);
    EXPECT_RESULT(out_of_memory, "cuMemAlloc_v2", &pointer, ~u64{0} - 5);
    EXPECT_RESULT(invalid_value, "cuMemAlloc_v2", &pointer, u64{0});
    const u64 large = allocate(u64{6} << 30); // pages are allocated at the first write
    CHECK(free_before - query_free_memory() == u64{6} << 30);
    EXPECT_RESULT(out_of_memory, "cuMemAlloc_v2", &pointer, u64{3} << 30);
    EXPECT_SUCCESS("cuMemFree_v2", large);
    CHECK(query_free_memory() == free_before);
    u64 pitch = 0;
    EXPECT_SUCCESS("cuMemAllocPitch_v2", &pointer, &pitch, u64{1000}, u64{10}, 4U);
    CHECK(pitch == 1024);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
    EXPECT_RESULT(out_of_memory, "cuMemAllocPitch_v2", &pointer, &pitch, u64{1} << 40, u64{1} << 40, 4U);
}

template <typename Value> Value query_attribute(u64 pointer, int number) {
    Value value{};
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&value), number, pointer);
    return value;
}

void test_pointer_attributes_describe_allocation(Handle context) {
    const u64 pointer = allocate(5000);
    CHECK(query_attribute<u64>(pointer, pointer_context) == context);
    CHECK(query_attribute<unsigned>(pointer + 7, pointer_memory_type) == memory_device);
    CHECK(query_attribute<u64>(pointer + 7, pointer_device_pointer) == pointer + 7);
    CHECK(query_attribute<unsigned>(pointer, pointer_is_managed) == 0 &&
          query_attribute<int>(pointer, pointer_device_ordinal) == 0);
    CHECK(query_attribute<unsigned>(pointer, pointer_is_legacy_ipc_capable) == 1);
    CHECK(query_attribute<u64>(pointer + 9, pointer_range_start) == pointer);
    CHECK(query_attribute<u64>(pointer, pointer_range_size) == 5000 &&
          query_attribute<unsigned>(pointer, pointer_mapped) == 1);
    CHECK(query_attribute<unsigned>(pointer, pointer_is_gpu_direct_rdma_capable) == 1);
    CHECK(query_attribute<unsigned>(pointer, pointer_access_flags) == access_read_write);
    CHECK(query_attribute<unsigned>(pointer, pointer_sync_memops) == 0);
    const unsigned enabled = 1;
    EXPECT_SUCCESS("cuPointerSetAttribute", static_cast<const void*>(&enabled), static_cast<int>(pointer_sync_memops),
                   pointer + 64);
    CHECK(query_attribute<unsigned>(pointer, pointer_sync_memops) == 1);
    u64 value = 0;
    void* const result = &value;
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result, static_cast<int>(pointer_host_pointer), pointer);
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result, 99, pointer);
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result, static_cast<int>(pointer_buffer_id), pointer + 5000);
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result, static_cast<int>(pointer_buffer_id),
                  reinterpret_cast<u64>(result));
    // cuPointerGetAttributes returns zeros for unregistered host memory.
    unsigned type = 7;
    int ordinal = 7;
    u64 id = 7;
    const int numbers[] = {pointer_memory_type, pointer_device_ordinal, pointer_buffer_id};
    void* results[] = {&type, &ordinal, &id};
    EXPECT_SUCCESS("cuPointerGetAttributes", 3U, numbers, results, reinterpret_cast<u64>(result));
    CHECK(type == 0 && ordinal == -2 && id == 0);
    EXPECT_SUCCESS("cuPointerGetAttributes", 3U, numbers, results, pointer);
    CHECK(type == memory_device && ordinal == 0 && id == query_buffer_id(pointer));
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
}

void test_peer_copy_between_devices() {
    const u64 first_memory = allocate(100);
    Handle first_context = 0, second_context = 0;
    EXPECT_SUCCESS("cuCtxGetCurrent", &first_context);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &second_context, 1);
    EXPECT_SUCCESS("cuCtxPushCurrent_v2", second_context);
    const u64 free_before = query_free_memory();
    const u64 second_memory = allocate(100);
    CHECK(query_free_memory() < free_before && query_attribute<int>(second_memory, pointer_device_ordinal) == 1);
    const auto bytes = make_pattern(100, 9);
    write_device(first_memory, bytes);
    EXPECT_SUCCESS("cuMemcpyPeer", second_memory, second_context, first_memory, first_context, u64{100});
    CHECK(read_device(second_memory, 100) == bytes);
    EXPECT_RESULT(invalid_context, "cuMemcpyPeer", second_memory, Handle{5}, first_memory, first_context, u64{100});
    EXPECT_SUCCESS("cuMemFree_v2", second_memory);
    EXPECT_SUCCESS("cuMemFree_v2", first_memory);
    EXPECT_SUCCESS("cuCtxPopCurrent_v2", &second_context);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 1);
}

} // namespace

int main() {
    test_cpu_access_faults();
    test_second_free_aborts();
    const Handle context = init_device();
    test_kernel_cannot_pin();
    test_bounds_are_exact();
    test_copies_at_odd_offsets_are_exact();
    test_memset_writes_values_of_each_width();
    test_reused_address_has_new_id();
    test_memory_usage_is_counted();
    test_pointer_attributes_describe_allocation(context);
    test_peer_copy_between_devices();
}
