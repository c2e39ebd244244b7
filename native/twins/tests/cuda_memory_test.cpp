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
            use_primary_context();
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

// The kernel ignores PROT_NONE when it pins memory, and in reads and writes of /proc/self/mem. So that the kernel
// cannot access device memory either, no pages are mapped at device addresses.
void test_kernel_cannot_pin() {
    const u64 pointer = allocate(4096);
    const Fd memory_file(open("/proc/self/mem", O_RDWR | O_CLOEXEC));
    CHECK(memory_file);
    char byte = 0;
    CHECK(pread(memory_file.get(), &byte, 1, static_cast<off_t>(pointer)) == -1 && errno == EIO);
    CHECK(pwrite(memory_file.get(), &byte, 1, static_cast<off_t>(pointer)) == -1 && errno == EIO);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
}

void test_second_free_aborts() {
    const int status = run_in_child([] {
        use_primary_context();
        const u64 pointer = allocate(4096);
        call_driver("cuMemFree_v2", pointer);
        call_driver("cuMemFree_v2", pointer);
    });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void test_bounds_are_exact() {
    const u64 pointer = allocate(100);
    const auto bytes = make_pattern(200, 1);
    const auto* const source = static_cast<const void*>(bytes.data());
    EXPECT_SUCCESS("cuMemcpyHtoD_v2", pointer, source, u64{100});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, source, u64{101});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer + 99, source, u64{2});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer + 100, source, u64{1});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", reinterpret_cast<u64>(source), source, u64{1});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, static_cast<const void*>(nullptr), u64{1});
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, source, ~u64{0});
    // A copy of 0 bytes needs no valid address.
    EXPECT_SUCCESS("cuMemcpyHtoD_v2", u64{0x10}, source, u64{0});
    EXPECT_RESULT(invalid_value, "cuMemsetD8_v2", pointer, static_cast<unsigned char>(1), u64{101});
    // A memset of 16-bit or 32-bit values needs an aligned address.
    EXPECT_RESULT(invalid_value, "cuMemsetD16_v2", pointer + 1, static_cast<unsigned short>(1), u64{2});
    EXPECT_RESULT(invalid_value, "cuMemsetD32_v2", pointer + 2, 1U, u64{2});
    u64 base = 0, length_bytes = 0;
    EXPECT_SUCCESS("cuMemGetAddressRange_v2", &base, &length_bytes, pointer + 99);
    CHECK(base == pointer && length_bytes == 100);
    EXPECT_RESULT(not_found, "cuMemGetAddressRange_v2", &base, &length_bytes, pointer + 100);
    CHECK(read_device(pointer, 100) == std::vector(bytes.begin(), bytes.begin() + 100));
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoD_v2", pointer, source, u64{1});
    EXPECT_RESULT(invalid_value, "cuMemcpyDtoH_v2", const_cast<void*>(source), pointer, u64{1});
}

void test_copies_at_odd_offsets_are_exact() {
    for (const u64 length_bytes : {u64{1}, u64{4095}, u64{65536}, u64{(1 << 20) + 3}}) {
        const u64 first_memory = allocate(length_bytes + 7), second_memory = allocate(length_bytes + 7);
        const auto bytes = make_pattern(length_bytes, 3);
        write_device(first_memory + 5, bytes);
        EXPECT_SUCCESS("cuMemcpyDtoD_v2", second_memory + 3, first_memory + 5, length_bytes);
        CHECK(read_device(second_memory + 3, length_bytes) == bytes);
        EXPECT_SUCCESS("cuMemcpy", first_memory, second_memory + 3, length_bytes);
        CHECK(read_device(first_memory, length_bytes) == bytes);
        EXPECT_SUCCESS("cuMemFree_v2", first_memory);
        EXPECT_SUCCESS("cuMemFree_v2", second_memory);
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
    const u64 old_pointer = allocate(1 << 21);
    const u64 old_buffer_id = query_buffer_id(old_pointer);
    EXPECT_SUCCESS("cuMemFree_v2", old_pointer);
    const u64 new_pointer = allocate(1 << 21);
    CHECK(new_pointer == old_pointer && query_buffer_id(new_pointer) > old_buffer_id);
    // Small allocations are aligned to 512 bytes and share pages, so at most one of these two begins at a page
    // boundary.
    const u64 first_small_pointer = allocate(100), second_small_pointer = allocate(300);
    CHECK(first_small_pointer % 512 == 0 && second_small_pointer % 512 == 0 &&
          (first_small_pointer % 4096 != 0 || second_small_pointer % 4096 != 0));
    EXPECT_SUCCESS("cuMemFree_v2", first_small_pointer);
    CHECK(allocate(200) == first_small_pointer);
    for (const u64 pointer : {new_pointer, first_small_pointer, second_small_pointer}) {
        EXPECT_SUCCESS("cuMemFree_v2", pointer);
    }
    // A free of the null pointer does nothing. Other addresses must be the start of an allocation.
    EXPECT_SUCCESS("cuMemFree_v2", u64{0});
    EXPECT_RESULT(invalid_value, "cuMemFree_v2", new_pointer + 64);
}

void test_memory_usage_is_counted() {
    const u64 free_bytes_before = query_free_memory();
    u64 pointer = 0;
    // The device has 8 GiB of memory.
    EXPECT_RESULT(out_of_memory, "cuMemAlloc_v2", &pointer, (u64{8} << 30) + 1);
    EXPECT_RESULT(out_of_memory, "cuMemAlloc_v2", &pointer, ~u64{0} - 5);
    EXPECT_RESULT(invalid_value, "cuMemAlloc_v2", &pointer, u64{0});
    // This allocation uses no host memory yet, because the kernel allocates pages at the first write.
    const u64 large_memory = allocate(u64{6} << 30);
    CHECK(free_bytes_before - query_free_memory() == u64{6} << 30);
    EXPECT_RESULT(out_of_memory, "cuMemAlloc_v2", &pointer, u64{3} << 30);
    EXPECT_SUCCESS("cuMemFree_v2", large_memory);
    CHECK(query_free_memory() == free_bytes_before);
    u64 pitch_bytes = 0;
    EXPECT_SUCCESS("cuMemAllocPitch_v2", &pointer, &pitch_bytes, u64{1000}, u64{10}, 4U);
    CHECK(pitch_bytes == 1024);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
    EXPECT_RESULT(out_of_memory, "cuMemAllocPitch_v2", &pointer, &pitch_bytes, u64{1} << 40, u64{1} << 40, 4U);
}

template <typename Value> Value query_attribute(u64 pointer, int attribute) {
    Value value{};
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&value), attribute, pointer);
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
    const unsigned sync_memops = 1;
    EXPECT_SUCCESS("cuPointerSetAttribute", static_cast<const void*>(&sync_memops),
                   static_cast<int>(pointer_sync_memops), pointer + 64);
    CHECK(query_attribute<unsigned>(pointer, pointer_sync_memops) == 1);
    u64 host_variable = 0;
    void* const result_pointer = &host_variable;
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result_pointer, static_cast<int>(pointer_host_pointer),
                  pointer);
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result_pointer, 99, pointer); // 99 is not an attribute
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result_pointer, static_cast<int>(pointer_buffer_id),
                  pointer + 5000);
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", result_pointer, static_cast<int>(pointer_buffer_id),
                  reinterpret_cast<u64>(result_pointer));
    // For unregistered host memory, cuPointerGetAttributes returns zeros, and CU_DEVICE_INVALID (-2) as the device
    // ordinal.
    unsigned memory_type = 7;
    int device_ordinal = 7;
    u64 buffer_id = 7;
    const int attributes[] = {pointer_memory_type, pointer_device_ordinal, pointer_buffer_id};
    void* result_pointers[] = {&memory_type, &device_ordinal, &buffer_id};
    EXPECT_SUCCESS("cuPointerGetAttributes", 3U, attributes, result_pointers, reinterpret_cast<u64>(result_pointer));
    CHECK(memory_type == 0 && device_ordinal == -2 && buffer_id == 0);
    EXPECT_SUCCESS("cuPointerGetAttributes", 3U, attributes, result_pointers, pointer);
    CHECK(memory_type == memory_device && device_ordinal == 0 && buffer_id == query_buffer_id(pointer));
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
}

void test_peer_copy_between_devices() {
    const u64 first_memory = allocate(100);
    Handle first_context = 0, second_context = 0;
    EXPECT_SUCCESS("cuCtxGetCurrent", &first_context);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &second_context, 1);
    EXPECT_SUCCESS("cuCtxPushCurrent_v2", second_context);
    const u64 free_bytes_before = query_free_memory();
    const u64 second_memory = allocate(100);
    CHECK(query_free_memory() < free_bytes_before && query_attribute<int>(second_memory, pointer_device_ordinal) == 1);
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
    // These two tests must run first: a child that is forked after cuInit cannot use the driver.
    test_cpu_access_faults();
    test_second_free_aborts();
    const Handle context = use_primary_context();
    test_kernel_cannot_pin();
    test_bounds_are_exact();
    test_copies_at_odd_offsets_are_exact();
    test_memset_writes_values_of_each_width();
    test_reused_address_has_new_id();
    test_memory_usage_is_counted();
    test_pointer_attributes_describe_allocation(context);
    test_peer_copy_between_devices();
}
