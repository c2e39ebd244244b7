// Tests of the software twin of libcuda: copies and memsets of rows (cuMemcpy2D*, cuMemcpy3D* and cuMemsetD2D*).
#include <algorithm>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

// The pitch and the width of the rows are in bytes.
constexpr u64 pitch = 100, width = 37, rows = 5, slices = 3;
constexpr u64 slice_rows = 7; // rows of each slice in memory; a copy uses `rows` of them
constexpr u64 volume_bytes = pitch * slice_rows * slices;
constexpr unsigned char canary = 0xee;

// The members of CopySide2d are x_bytes, y, memory_type, host, device, array and pitch_bytes.
CopySide2d make_host_side(void* host_memory, u64 pitch_bytes) {
    return {0, 0, memory_host, host_memory, 0, nullptr, pitch_bytes};
}

CopySide2d make_device_side(u64 device_address, u64 pitch_bytes) {
    return {0, 0, memory_device, nullptr, device_address, nullptr, pitch_bytes};
}

// The members of CopySide3d are x_bytes, y, z, lod, memory_type, host, device, array, context, pitch_bytes and height.
CopySide3d make_unified_side(u64 address, u64 pitch_bytes, u64 height) {
    return {0, 0, 0, 0, memory_unified, nullptr, address, nullptr, 0, pitch_bytes, height};
}

u64 address_of(const std::vector<unsigned char>& bytes) {
    return reinterpret_cast<u64>(bytes.data());
}

// Copy rows to device memory whose pitch is 2 * pitch. The copy begins at byte 3 of each row of the memory. Then copy
// three rows back. The bytes between the copied rows stay unchanged.
void test_rows_are_copied_exactly() {
    const u64 memory = allocate(2 * pitch * rows);
    write_device(memory, std::vector(2 * pitch * rows, canary));
    std::vector<unsigned char> host_bytes = make_pattern(width * rows, 1);
    Copy2d to_device{make_host_side(host_bytes.data(), width), make_device_side(memory, 2 * pitch), width, rows};
    to_device.to.x_bytes = 3;
    EXPECT_SUCCESS("cuMemcpy2D_v2", static_cast<const Copy2d*>(&to_device));
    const auto device_bytes = read_device(memory, 2 * pitch * rows);
    for (u64 index = 0; index < device_bytes.size(); ++index) {
        const u64 row = index / (2 * pitch), column = index % (2 * pitch);
        const bool was_copied = column >= 3 && column < 3 + width;
        CHECK(device_bytes[index] == (was_copied ? host_bytes[row * width + column - 3] : canary));
    }
    // Copy rows 1 to 3 back, into a buffer with its own pitch.
    std::vector<unsigned char> read_bytes(50 * 3, canary);
    Copy2d to_host{make_device_side(memory, 2 * pitch), make_host_side(read_bytes.data(), 50), width, 3};
    to_host.from.x_bytes = 3;
    to_host.from.y = 1;
    EXPECT_SUCCESS("cuMemcpy2DUnaligned_v2", static_cast<const Copy2d*>(&to_host));
    for (u64 index = 0; index < read_bytes.size(); ++index) {
        CHECK(read_bytes[index] == (index % 50 < width ? host_bytes[(index / 50 + 1) * width + index % 50] : canary));
    }
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

void test_volume_is_copied_between_devices() {
    Handle contexts[2] = {use_primary_context(0), 0};
    const u64 source_memory = allocate(volume_bytes);
    const auto bytes = make_pattern(volume_bytes, 2);
    write_device(source_memory, bytes);
    contexts[1] = use_primary_context(1);
    const u64 target_memory = allocate(volume_bytes);
    write_device(target_memory, std::vector(volume_bytes, canary));
    // The synchronous copy writes the columns from 0 on, and the asynchronous copy writes the columns from 60 on. Both
    // read from row 2 on.
    for (const bool is_async : {false, true}) {
        Copy3d copy{make_unified_side(source_memory, pitch, slice_rows),
                    make_unified_side(target_memory, pitch, slice_rows), width, rows, slices};
        copy.from.context = contexts[0];
        copy.to.context = contexts[1];
        copy.from.y = 2;
        copy.to.x_bytes = is_async ? 60 : 0;
        const auto* const parameters = &copy;
        if (is_async) {
            EXPECT_SUCCESS("cuMemcpy3DPeerAsync", parameters, Handle{0});
        } else {
            EXPECT_SUCCESS("cuMemcpy3DPeer", parameters);
        }
        EXPECT_SUCCESS("cuCtxSynchronize");
    }
    const auto target_bytes = read_device(target_memory, volume_bytes);
    for (u64 index = 0; index < volume_bytes; ++index) {
        const u64 slice = index / (pitch * slice_rows), row = index / pitch % slice_rows, column = index % pitch;
        const bool was_copied = row < rows && (column < width || (column >= 60 && column < 60 + width));
        const u64 source_index = (slice * slice_rows + row + 2) * pitch + column % 60;
        CHECK(target_bytes[index] == (was_copied ? bytes[source_index] : canary));
    }
    EXPECT_SUCCESS("cuMemFree_v2", target_memory);
    use_primary_context(0);
    EXPECT_SUCCESS("cuMemFree_v2", source_memory);
}

// Work of the target device that follows a peer copy waits until the copy is done.
void test_later_work_of_a_peer_waits() {
    const Handle first_context = use_primary_context(0);
    const u64 source_memory = allocate(width);
    write_device(source_memory, make_pattern(width, 4));
    const Handle second_context = use_primary_context(1);
    const u64 target_memory = allocate(width);
    write_device(target_memory, std::vector(width, canary));
    EXPECT_SUCCESS("cuCtxSetCurrent", first_context);
    EXPECT_SUCCESS("cuMemcpyPeer", target_memory, second_context, source_memory, first_context, width);
    EXPECT_SUCCESS("cuCtxSetCurrent", second_context);
    CHECK(read_device(target_memory, width) == make_pattern(width, 4));
    EXPECT_SUCCESS("cuMemFree_v2", target_memory);
    EXPECT_SUCCESS("cuCtxSetCurrent", first_context);
    EXPECT_SUCCESS("cuMemFree_v2", source_memory);
}

// cuMemcpy2DAsync returns only after it has read a pageable source, or has written a pageable destination.
void test_pageable_rows_are_staged() {
    const u64 memory = allocate(pitch * rows);
    std::vector<unsigned char> host_bytes = make_pattern(width * rows, 3);
    const std::vector<unsigned char> original_bytes = host_bytes;
    const Copy2d to_device{make_host_side(host_bytes.data(), width), make_device_side(memory, pitch), width, rows};
    EXPECT_SUCCESS("cuMemcpy2DAsync_v2", &to_device, Handle{0});
    std::ranges::fill(host_bytes, canary);
    const Copy2d to_host{make_device_side(memory, pitch), make_host_side(host_bytes.data(), width), width, rows};
    EXPECT_SUCCESS("cuMemcpy2DAsync_v2", &to_host, Handle{0});
    CHECK(host_bytes == original_bytes);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

void test_invalid_rows_are_refused() {
    const u64 memory = allocate(pitch * (rows - 1) + width);
    std::vector<unsigned char> host_bytes(volume_bytes);
    const Copy2d valid_copy{make_device_side(memory, pitch), make_host_side(host_bytes.data(), width), width, rows};
    const auto expect_result = [](int expected_result, const Copy2d& copy) {
        EXPECT_RESULT(expected_result, "cuMemcpy2D_v2", &copy);
        EXPECT_RESULT(expected_result, "cuMemcpy2DAsync_v2", &copy, Handle{0});
    };
    // The last row ends at the end of the allocation.
    expect_result(success, valid_copy);
    Copy2d copy = valid_copy;
    copy.from.x_bytes = 1;
    expect_result(invalid_value, copy);
    copy = valid_copy;
    copy.from.y = 1;
    expect_result(invalid_value, copy);
    // A pitch must be at least the width and less than 2^31.
    for (const u64 pitch_bytes : {u64{0}, width - 1, u64{1} << 31}) {
        copy = valid_copy;
        copy.to.pitch_bytes = pitch_bytes;
        expect_result(invalid_value, copy);
    }
    copy = valid_copy;
    copy.height = ~u64{0};
    expect_result(invalid_value, copy);
    // The source is too short for 2^34 rows of one byte. The twin must refuse the copy before it makes a list of the
    // rows.
    expect_result(invalid_value, {make_device_side(memory, 1), make_host_side(host_bytes.data(), 1), 1, u64{1} << 34});
    copy = valid_copy;
    copy.to.memory_type = memory_array; // with a null handle
    expect_result(invalid_value, copy);
    copy.to.memory_type = 9; // not a memory type
    expect_result(invalid_value, copy);
    copy = valid_copy;
    copy.from.memory_type = memory_host; // with the null pointer as host memory
    expect_result(invalid_value, copy);
    EXPECT_RESULT(invalid_value, "cuMemcpy2D_v2", static_cast<const Copy2d*>(nullptr));
    // A copy of one row needs no pitch, and an empty copy needs no memory.
    copy = valid_copy;
    copy.height = 1;
    copy.from.pitch_bytes = copy.to.pitch_bytes = 0;
    expect_result(success, copy);
    copy = valid_copy;
    copy.from.device = 0x10;
    copy.height = 0;
    expect_result(success, copy);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

void test_invalid_volumes_are_refused() {
    const u64 memory = allocate(volume_bytes);
    const std::vector<unsigned char> host_bytes(volume_bytes);
    const Copy3d valid_copy{make_unified_side(memory, pitch, slice_rows),
                            make_unified_side(address_of(host_bytes), pitch, slice_rows), width, rows, slices};
    EXPECT_SUCCESS("cuMemcpy3D_v2", &valid_copy);
    Copy3d copy = valid_copy;
    copy.from.height = rows - 1;
    EXPECT_RESULT(invalid_value, "cuMemcpy3D_v2", static_cast<const Copy3d*>(&copy));
    copy.from.height = ~u64{0};
    EXPECT_RESULT(invalid_value, "cuMemcpy3D_v2", static_cast<const Copy3d*>(&copy));
    copy = valid_copy;
    copy.from.z = 1;
    EXPECT_RESULT(invalid_value, "cuMemcpy3DAsync_v2", static_cast<const Copy3d*>(&copy), Handle{0});
    copy = valid_copy;
    copy.to.lod = 1; // must be 0
    EXPECT_RESULT(invalid_value, "cuMemcpy3D_v2", static_cast<const Copy3d*>(&copy));
    EXPECT_RESULT(invalid_context, "cuMemcpy3DPeer", &valid_copy); // without the contexts
    EXPECT_RESULT(invalid_handle, "cuMemcpy3DAsync_v2", &valid_copy, Handle{77});
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

void test_rows_are_filled_exactly() {
    const u64 memory = allocate(pitch * rows);
    // Check the rows, and reset all bytes to the canary.
    const auto check_and_reset_rows = [&](u64 width_bytes, const std::vector<unsigned char>& element_bytes) {
        const auto bytes = read_device(memory, pitch * rows);
        for (u64 index = 0; index < bytes.size(); ++index) {
            CHECK(bytes[index] ==
                  (index % pitch < width_bytes ? element_bytes[index % pitch % element_bytes.size()] : canary));
        }
        write_device(memory, std::vector(pitch * rows, canary));
    };
    write_device(memory, std::vector(pitch * rows, canary));
    EXPECT_SUCCESS("cuMemsetD2D8_v2", memory, pitch, static_cast<unsigned char>(1), u64{7}, rows);
    check_and_reset_rows(7, {1});
    EXPECT_SUCCESS("cuMemsetD2D16_v2", memory, pitch, static_cast<unsigned short>(0x201), u64{7}, rows);
    check_and_reset_rows(14, {1, 2});
    EXPECT_SUCCESS("cuMemsetD2D32Async", memory, pitch, 0x4030201U, u64{7}, rows, Handle{0});
    check_and_reset_rows(28, {1, 2, 3, 4});
    EXPECT_RESULT(invalid_value, "cuMemsetD2D8_v2", memory, pitch, static_cast<unsigned char>(1), pitch + 1, rows);
    EXPECT_RESULT(invalid_value, "cuMemsetD2D8Async", memory, pitch, static_cast<unsigned char>(1), u64{7}, rows + 1,
                  Handle{0});
    // The pitch (51) and the address (memory + 2) must be multiples of the element size.
    EXPECT_RESULT(invalid_value, "cuMemsetD2D16Async", memory, u64{51}, static_cast<unsigned short>(1), u64{7}, rows,
                  Handle{0});
    EXPECT_RESULT(invalid_value, "cuMemsetD2D32_v2", memory + 2, pitch, 1U, u64{7}, rows);
    EXPECT_SUCCESS("cuMemsetD2D8_v2", memory, u64{0}, static_cast<unsigned char>(1), u64{7}, u64{0});
    check_and_reset_rows(0, {1});
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

} // namespace

int main() {
    use_primary_context();
    test_rows_are_copied_exactly();
    test_volume_is_copied_between_devices();
    test_later_work_of_a_peer_waits();
    test_pageable_rows_are_staged();
    test_invalid_rows_are_refused();
    test_invalid_volumes_are_refused();
    test_rows_are_filled_exactly();
}
