// Tests of the software twin of libcuda: CUDA arrays and mipmapped arrays as sources and destinations of copies.
#include "cuda/array_abi.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

// The size of the three-dimensional test arrays in elements. An element is two floats.
constexpr u64 width = 100, height = 7, depth = 3, element_bytes = 8, row_bytes = width * element_bytes;
const ArrayDescription volume_description{width, height, depth, format_float, 2, array_surface};

Handle create_array(const ArrayDescription& description) {
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

CopySide3d make_host_side(void* host_memory) {
    CopySide3d side{};
    side.memory_type = memory_host;
    side.host = host_memory;
    side.pitch_bytes = row_bytes;
    side.height = height;
    return side;
}

void test_volume_is_copied() {
    const u64 free_before = query_free_memory();
    const Handle array = create_array(volume_description), second_array = create_array(volume_description);
    CHECK(query_free_memory() < free_before);
    std::vector<unsigned char> source_bytes = make_pattern(row_bytes * height * depth, 1),
                               copied_bytes(source_bytes.size());
    const Copy3d copy_in{make_host_side(source_bytes.data()), make_array_side(array), row_bytes, height, depth};
    const Copy3d copy_across{make_array_side(array), make_array_side(second_array), row_bytes, height, depth};
    const Copy3d copy_out{make_array_side(second_array), make_host_side(copied_bytes.data()), row_bytes, height, depth};
    EXPECT_SUCCESS("cuMemcpy3D_v2", &copy_in);
    EXPECT_SUCCESS("cuMemcpy3DAsync_v2", &copy_across, Handle{0});
    EXPECT_SUCCESS("cuMemcpy3D_v2", &copy_out);
    CHECK(copied_bytes == source_bytes);
    ArrayDescription queried_description{};
    EXPECT_SUCCESS("cuArray3DGetDescriptor_v2", &queried_description, array);
    CHECK(queried_description.width == width && queried_description.depth == depth &&
          queried_description.channels == 2 && queried_description.flags == array_surface);
    // A copy that would end outside of the array is refused.
    for (const CopySide3d& side_outside :
         {make_array_side(array, 1), make_array_side(array, 0, 1), make_array_side(array, 0, 0, 1)}) {
        const Copy3d copy{make_host_side(source_bytes.data()), side_outside, row_bytes, height, depth};
        EXPECT_RESULT(invalid_value, "cuMemcpy3D_v2", &copy);
    }
    for (const Handle array_to_destroy : {array, second_array}) {
        EXPECT_SUCCESS("cuArrayDestroy", array_to_destroy);
    }
    EXPECT_RESULT(invalid_value, "cuMemcpy3D_v2", &copy_in);
    CHECK(query_free_memory() == free_before);
}

// The copy functions for one-dimensional arrays take an offset and a length in bytes.
void test_parts_are_named_by_offsets() {
    const PlaneDescription plane_description{width, 0, format_unsigned_8, 1};
    Handle array = 0;
    EXPECT_SUCCESS("cuArrayCreate_v2", &array, &plane_description);
    const u64 memory = allocate(width);
    const auto source_bytes = make_pattern(width, 2);
    std::vector<unsigned char> read_bytes(width);
    EXPECT_SUCCESS("cuMemcpyHtoA_v2", array, u64{0}, static_cast<const void*>(source_bytes.data()), u64{width});
    EXPECT_SUCCESS("cuMemcpyAtoD_v2", memory, array, u64{0}, u64{width});
    CHECK(read_device(memory, width) == source_bytes);
    // Set the bytes 90 to 99 of the array to 9, and copy the last five of them to the start of the array.
    EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(9), u64{10});
    EXPECT_SUCCESS("cuMemcpyDtoA_v2", array, u64{90}, memory, u64{10});
    EXPECT_SUCCESS("cuMemcpyAtoA_v2", array, u64{0}, array, u64{95}, u64{5});
    EXPECT_SUCCESS("cuMemcpyAtoHAsync_v2", static_cast<void*>(read_bytes.data()), array, u64{0}, u64{width}, Handle{0});
    EXPECT_SUCCESS("cuCtxSynchronize");
    CHECK(read_bytes[0] == 9 && read_bytes[4] == 9 && read_bytes[5] == source_bytes[5] &&
          read_bytes[89] == source_bytes[89] && read_bytes[99] == 9);
    EXPECT_RESULT(invalid_value, "cuMemcpyHtoA_v2", array, u64{1}, static_cast<const void*>(source_bytes.data()),
                  u64{width});
    PlaneDescription queried_description{};
    EXPECT_SUCCESS("cuArrayGetDescriptor_v2", &queried_description, array);
    CHECK(queried_description.width == width && queried_description.height == 0 && queried_description.channels == 1);
    EXPECT_SUCCESS("cuArrayDestroy", array);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// Each side of a level is half as long as in the level before, but at least 1. The destruction of a mipmapped array
// destroys its levels.
void test_mipmap_has_levels() {
    const u64 free_before = query_free_memory();
    const ArrayDescription description{64, 16, 0, format_half, 4, 0};
    Handle mipmap = 0, level = 0;
    EXPECT_SUCCESS("cuMipmappedArrayCreate", &mipmap, &description, 99U);
    // Only 7 of the 99 requested levels exist: the level with the index 6 is one element wide (64 >> 6).
    ArrayDescription queried_description{};
    for (unsigned index = 0; index < 7; ++index) {
        EXPECT_SUCCESS("cuMipmappedArrayGetLevel", &level, mipmap, index);
        EXPECT_SUCCESS("cuArray3DGetDescriptor_v2", &queried_description, level);
        CHECK(queried_description.width == u64{64} >> index &&
              queried_description.height == (index < 4 ? u64{16} >> index : 1));
    }
    EXPECT_RESULT(invalid_value, "cuMipmappedArrayGetLevel", &level, mipmap, 7U);
    const auto bytes = make_pattern(8, 3);
    EXPECT_SUCCESS("cuMemcpyHtoA_v2", level, u64{0}, static_cast<const void*>(bytes.data()), u64{8});
    EXPECT_RESULT(invalid_handle, "cuArrayDestroy", level);
    EXPECT_SUCCESS("cuMipmappedArrayDestroy", mipmap);
    EXPECT_RESULT(invalid_handle, "cuArray3DGetDescriptor_v2", &queried_description, level);
    CHECK(query_free_memory() == free_before);
}

void test_wrong_descriptions_are_refused() {
    Handle array = 0;
    const auto expect_create_result = [&](int expected_result, ArrayDescription description) {
        EXPECT_RESULT(expected_result, "cuArray3DCreate_v2", &array,
                      static_cast<const ArrayDescription*>(&description));
    };
    // The values of a description are width, height, depth, format, channels and flags.
    expect_create_result(invalid_value, {0, 1, 0, format_float, 1, 0});
    expect_create_result(invalid_value, {1, 1, 0, 0x77, 1, 0});                     // 0x77 is not a format
    expect_create_result(invalid_value, {1, 1, 0, format_float, 3, 0});             // an element has 1, 2 or 4 channels
    expect_create_result(invalid_value, {1, 0, 1, format_float, 1, 0});             // a volume needs a height
    expect_create_result(invalid_value, {131073, 1, 0, format_float, 1, 0});        // the maximum width is 131072
    expect_create_result(invalid_value, {8, 8, 5, format_float, 1, array_cubemap}); // a cube has 6 faces
    expect_create_result(not_supported, {8, 8, 0, format_float, 1, 0x40});          // CUDA_ARRAY3D_SPARSE
    expect_create_result(invalid_value, {8, 8, 0, format_float, 1, 0x4000});        // not a flag
    EXPECT_RESULT(invalid_value, "cuArray3DCreate_v2", &array, static_cast<const ArrayDescription*>(nullptr));
    EXPECT_RESULT(invalid_handle, "cuArrayDestroy", Handle{5}); // 5 is not a handle of an array
}

// A reset of the context destroys its arrays.
void test_reset_destroys_arrays() {
    const Handle array = create_array(volume_description);
    EXPECT_SUCCESS("cuDevicePrimaryCtxReset_v2", 0);
    use_primary_context();
    EXPECT_RESULT(invalid_handle, "cuArrayDestroy", array);
}

} // namespace

int main() {
    use_primary_context();
    test_volume_is_copied();
    test_parts_are_named_by_offsets();
    test_mipmap_has_levels();
    test_wrong_descriptions_are_refused();
    test_reset_destroys_arrays();
}
