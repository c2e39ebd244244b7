// Tests of arrays and mipmapped arrays as memory.
#include "cuda/array_abi.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr u64 width = 100, height = 7, depth = 3, element_bytes = 8, row_bytes = width * element_bytes;
const ArrayDescription volume{width, height, depth, format_float, 2, array_surface};

Handle create(const ArrayDescription& description) {
    Handle array = 0;
    EXPECT_SUCCESS("cuArray3DCreate_v2", &array, &description);
    return array;
}

CopySide3d make_array_side(Handle array, u64 x_bytes = 0, u64 y = 0, u64 z = 0) {
    CopySide3d side{};
    side.memory_type = memory_array;
    side.array = reinterpret_cast<void*>(array);
    side.x_bytes = x_bytes;
    side.y = y;
    side.z = z;
    return side;
}

CopySide3d make_host_side(void* host) {
    CopySide3d side{};
    side.memory_type = memory_host;
    side.host = host;
    side.pitch_bytes = row_bytes;
    side.height = height;
    return side;
}

void test_volume_is_copied() {
    const u64 before = free_memory();
    const Handle array = create(volume), other = create(volume);
    CHECK(free_memory() < before);
    std::vector<unsigned char> from = pattern(row_bytes * height * depth, 1), to(from.size());
    const Copy3d into{make_host_side(from.data()), make_array_side(array), row_bytes, height, depth};
    const Copy3d across{make_array_side(array), make_array_side(other), row_bytes, height, depth};
    const Copy3d out{make_array_side(other), make_host_side(to.data()), row_bytes, height, depth};
    EXPECT_SUCCESS("cuMemcpy3D_v2", &into);
    EXPECT_SUCCESS("cuMemcpy3DAsync_v2", &across, Handle{0});
    EXPECT_SUCCESS("cuMemcpy3D_v2", &out);
    CHECK(to == from);
    ArrayDescription queried{};
    EXPECT_SUCCESS("cuArray3DGetDescriptor_v2", &queried, array);
    CHECK(queried.width == width && queried.depth == depth && queried.channels == 2 && queried.flags == array_surface);
    // A copy must be within the array.
    for (const CopySide3d& outside :
         {make_array_side(array, 1), make_array_side(array, 0, 1), make_array_side(array, 0, 0, 1)}) {
        const Copy3d copy{make_host_side(from.data()), outside, row_bytes, height, depth};
        EXPECT_RESULT(invalid_value, "cuMemcpy3D_v2", &copy);
    }
    for (const Handle array_to_destroy : {array, other}) {
        EXPECT_SUCCESS("cuArrayDestroy", array_to_destroy);
    }
    EXPECT_RESULT(invalid_value, "cuMemcpy3D_v2", &into);
    CHECK(free_memory() == before);
}

void test_parts_are_named_by_offsets() {
    const PlaneDescription plane{width, 0, format_unsigned_8, 1};
    Handle array = 0;
    EXPECT_SUCCESS("cuArrayCreate_v2", &array, &plane);
    const u64 memory = allocate(width);
    const auto bytes = pattern(width, 2);
    std::vector<unsigned char> read(width);
    EXPECT_SUCCESS("cuMemcpyHtoA_v2", array, u64{0}, static_cast<const void*>(bytes.data()), u64{width});
    EXPECT_SUCCESS("cuMemcpyAtoD_v2", memory, array, u64{0}, u64{width});
    CHECK(read_device(memory, width) == bytes);
    EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(9), u64{10});
    EXPECT_SUCCESS("cuMemcpyDtoA_v2", array, u64{90}, memory, u64{10});
    EXPECT_SUCCESS("cuMemcpyAtoA_v2", array, u64{0}, array, u64{95}, u64{5});
    EXPECT_SUCCESS("cuMemcpyAtoHAsync_v2", static_cast<void*>(read.data()), array, u64{0}, u64{width}, Handle{0});
    EXPECT_SUCCESS("cuCtxSynchronize");
    CHECK(read[0] == 9 && read[4] == 9 && read[5] == bytes[5] && read[89] == bytes[89] && read[99] == 9);
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoA_v2", array, u64{1}, static_cast<const void*>(bytes.data()), u64{width});
    PlaneDescription queried{};
    EXPECT_SUCCESS("cuArrayGetDescriptor_v2", &queried, array);
    CHECK(queried.width == width && queried.height == 0 && queried.channels == 1);
    EXPECT_SUCCESS("cuArrayDestroy", array);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// Each level is half as large, and the mipmapped array destroys it.
void test_mipmap_has_levels() {
    const u64 before = free_memory();
    const ArrayDescription description{64, 16, 0, format_half, 4, 0};
    Handle mipmap = 0, level = 0;
    EXPECT_SUCCESS("cuMipmappedArrayCreate", &mipmap, &description, 99U);
    ArrayDescription queried{};
    for (unsigned index = 0; index < 7; ++index) {
        EXPECT_SUCCESS("cuMipmappedArrayGetLevel", &level, mipmap, index);
        EXPECT_SUCCESS("cuArray3DGetDescriptor_v2", &queried, level);
        CHECK(queried.width == u64{64} >> index && queried.height == (index < 4 ? u64{16} >> index : 1));
    }
    EXPECT_RESULT(invalid_value, "cuMipmappedArrayGetLevel", &level, mipmap, 7U);
    const auto bytes = pattern(8, 3);
    EXPECT_SUCCESS("cuMemcpyHtoA_v2", level, u64{0}, static_cast<const void*>(bytes.data()), u64{8});
    EXPECT_RESULT(invalid_handle, "cuArrayDestroy", level);
    EXPECT_SUCCESS("cuMipmappedArrayDestroy", mipmap);
    EXPECT_RESULT(invalid_handle, "cuArray3DGetDescriptor_v2", &queried, level);
    CHECK(free_memory() == before);
}

void test_wrong_descriptions_are_refused() {
    Handle array = 0;
    const auto expect = [&](int expected, ArrayDescription description) {
        EXPECT_RESULT(expected, "cuArray3DCreate_v2", &array, static_cast<const ArrayDescription*>(&description));
    };
    expect(invalid_value, {0, 1, 0, format_float, 1, 0});
    expect(invalid_value, {1, 1, 0, 0x77, 1, 0});
    expect(invalid_value, {1, 1, 0, format_float, 3, 0});
    expect(invalid_value, {1, 0, 1, format_float, 1, 0});
    expect(invalid_value, {131073, 1, 0, format_float, 1, 0});
    expect(invalid_value, {8, 8, 5, format_float, 1, array_cubemap});
    expect(not_supported, {8, 8, 0, format_float, 1, 0x40});
    expect(invalid_value, {8, 8, 0, format_float, 1, 0x4000});
    EXPECT_RESULT(invalid_value, "cuArray3DCreate_v2", &array, static_cast<const ArrayDescription*>(nullptr));
    EXPECT_RESULT(invalid_handle, "cuArrayDestroy", Handle{5});
}

// The arrays of a context end with it.
void test_reset_destroys_arrays() {
    const Handle array = create(volume);
    EXPECT_SUCCESS("cuDevicePrimaryCtxReset_v2", 0);
    init_device();
    EXPECT_RESULT(invalid_handle, "cuArrayDestroy", array);
}

} // namespace

int main() {
    init_device();
    test_volume_is_copied();
    test_parts_are_named_by_offsets();
    test_mipmap_has_levels();
    test_wrong_descriptions_are_refused();
    test_reset_destroys_arrays();
}
