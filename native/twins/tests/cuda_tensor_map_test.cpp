// Tests of the software twin of libcuda: the parameters that cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col accept
// and refuse, and cuTensorMapReplaceAddress.
#include <array>
#include <cstring>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

// Values of CUtensorMapDataType.
constexpr int type_uint8 = 0, type_float32 = 7, type_16u4_align8 = 13, type_16u6_align16 = 15;

// A CUtensorMap.
struct alignas(128) Map {
    std::array<u64, 16> words{};
};

// Valid parameters for a tensor of 64 x 32 x 8 floats. Each check changes some of them. The values of the enumerations
// are: interleave 0 (none), 1 (16 bytes), 2 (32 bytes); swizzle 0 (none), 1 (32 bytes), 2 (64 bytes), 3 (128 bytes), up
// to 6; promotion 0 to 3; fill 0 (zeros), 1 (NaN).
struct Parameters {
    Map map;
    int type = type_float32;
    std::uint32_t rank = 3;
    u64 address = 0x700000000;
    std::array<u64, 5> extents{64, 32, 8, 4, 2};
    std::array<u64, 4> strides_bytes{256, 8192, 65536, 262144};
    std::array<std::uint32_t, 5> box_extents{32, 4, 1, 1, 1}, element_strides{1, 1, 1, 1, 1};
    std::array<int, 3> lower_corner{0, 0, 0}, upper_corner{0, 0, 0};
    std::uint32_t channels_per_pixel = 64, pixels_per_column = 16;
    int interleave = 0, swizzle = 0, promotion = 0, fill = 0;

    int encode_tiled() {
        return call_driver(
            "cuTensorMapEncodeTiled", static_cast<void*>(&map), type, rank, reinterpret_cast<void*>(address),
            static_cast<const u64*>(extents.data()), static_cast<const u64*>(strides_bytes.data()),
            static_cast<const std::uint32_t*>(box_extents.data()),
            static_cast<const std::uint32_t*>(element_strides.data()), interleave, swizzle, promotion, fill);
    }

    int encode_im2col() {
        return call_driver("cuTensorMapEncodeIm2col", static_cast<void*>(&map), type, rank,
                           reinterpret_cast<void*>(address), static_cast<const u64*>(extents.data()),
                           static_cast<const u64*>(strides_bytes.data()), static_cast<const int*>(lower_corner.data()),
                           static_cast<const int*>(upper_corner.data()), channels_per_pixel, pixels_per_column,
                           static_cast<const std::uint32_t*>(element_strides.data()), interleave, swizzle, promotion,
                           fill);
    }
};

template <typename Change> int encode_tiled_with(Change&& change) {
    Parameters parameters;
    change(parameters);
    return parameters.encode_tiled();
}

template <typename Change> int encode_im2col_with(Change&& change) {
    Parameters parameters;
    change(parameters);
    return parameters.encode_im2col();
}

void test_valid_tensors_are_described() {
    CHECK(encode_tiled_with([](Parameters&) {}) == success);
    CHECK(encode_tiled_with([](Parameters& p) { p.rank = 1; }) == success);
    CHECK(encode_tiled_with([](Parameters& p) { p.rank = 5; }) == success);
    CHECK(encode_tiled_with([](Parameters& p) { p.swizzle = 3; }) == success);
    CHECK(encode_tiled_with([](Parameters& p) { p.interleave = 2, p.swizzle = 1; }) == success);
    CHECK(encode_tiled_with([](Parameters& p) { p.fill = 1; }) == success);
    // Without interleaving, the driver ignores the element stride of the first dimension.
    CHECK(encode_tiled_with([](Parameters& p) { p.element_strides[0] = 9; }) == success);
    CHECK(encode_tiled_with([](Parameters& p) {
              p.type = type_16u6_align16, p.extents[0] = 128, p.box_extents[0] = 128;
          }) == success);
    CHECK(encode_im2col_with([](Parameters&) {}) == success);
    CHECK(encode_im2col_with([](Parameters& p) {
              p.rank = 5, p.lower_corner = {-16, -16, -1}, p.upper_corner = {15, 0, -1};
          }) == success);
}

// The limits are: rank 1 to 5, and at least 3 with interleaving; address and strides are multiples of 16 bytes, or of
// 32 bytes with an interleave of 32 bytes; extents up to 2^32; strides below 2^40 bytes; sides of the box 1 to 256, and
// its inner side a multiple of 16 bytes; element strides 1 to 8. The type 16U4_ALIGN8 needs an even inner
// extent. 16U6_ALIGN16 needs an inner extent that is a multiple of 128, and 128 as the inner side of the box. Only
// tensors of floats can be filled with NaN.
void test_wrong_tiled_tensors_are_refused() {
    CHECK(encode_tiled_with([](Parameters& p) { p.rank = 0; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.rank = 6; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.rank = 2, p.interleave = 1; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.type = 16; }) == invalid_value); // 16 is not a data type
    CHECK(encode_tiled_with([](Parameters& p) { p.address += 8; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.address += 16; }) == success);
    CHECK(encode_tiled_with([](Parameters& p) { p.address += 16, p.interleave = 2, p.swizzle = 1; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.extents[2] = 0; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.extents[2] = (u64{1} << 32) + 1; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.type = type_16u4_align8, p.extents[0] = 63; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.type = type_16u6_align16, p.box_extents[0] = 128; }) ==
          invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.strides_bytes[1] = 8200; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.strides_bytes[1] = u64{1} << 40; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.box_extents[0] = 3; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.box_extents[1] = 0; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.box_extents[1] = 257; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.element_strides[1] = 0; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.element_strides[1] = 9; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.element_strides[0] = 9, p.interleave = 1; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.interleave = 3; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.interleave = 2; }) == invalid_value); // interleave 2 needs swizzle 1
    CHECK(encode_tiled_with([](Parameters& p) { p.swizzle = 2; }) == invalid_value); // a row of the box has 128 bytes
    CHECK(encode_tiled_with([](Parameters& p) { p.swizzle = 7; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.promotion = 4; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.fill = 1, p.type = type_uint8; }) == invalid_value);
    // A map must be aligned to 64 bytes.
    Parameters valid_parameters;
    alignas(128) std::array<std::byte, 256> map_memory{};
    EXPECT_RESULT(invalid_value, "cuTensorMapEncodeTiled", static_cast<void*>(map_memory.data() + 32),
                  valid_parameters.type, valid_parameters.rank, reinterpret_cast<void*>(valid_parameters.address),
                  static_cast<const u64*>(valid_parameters.extents.data()),
                  static_cast<const u64*>(valid_parameters.strides_bytes.data()),
                  static_cast<const std::uint32_t*>(valid_parameters.box_extents.data()),
                  static_cast<const std::uint32_t*>(valid_parameters.element_strides.data()), 0, 0, 0, 0);
}

// The limits are: rank 3 to 5; 256 channels and 1024 pixels; corner offsets from -32768 to 32767 for rank 3, from -128
// to 127 for rank 4, and from -16 to 15 for rank 5.
void test_wrong_im2col_tensors_are_refused() {
    CHECK(encode_im2col_with([](Parameters& p) { p.rank = 2; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.channels_per_pixel = 257; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.pixels_per_column = 1025; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.lower_corner[0] = -32769; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.rank = 4, p.upper_corner[1] = 128; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.rank = 5, p.upper_corner[1] = 16; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.lower_corner[0] = 32; }) == invalid_value); // no pixel is left
    CHECK(encode_im2col_with([](Parameters& p) { p.swizzle = 3; }) == invalid_value);          // a pixel has 256 bytes
}

// cuTensorMapReplaceAddress changes only the address in a map. The new address must have the alignment that the map
// requires: 32 bytes with an interleave of 32 bytes.
void test_address_is_replaced() {
    Parameters parameters, expected_parameters;
    parameters.interleave = 2;
    parameters.swizzle = 1;
    expected_parameters = parameters;
    expected_parameters.address = 0x800000000;
    CHECK(parameters.encode_tiled() == success && expected_parameters.encode_tiled() == success);
    CHECK(parameters.map.words != expected_parameters.map.words);
    void* const map = &parameters.map;
    EXPECT_RESULT(invalid_value, "cuTensorMapReplaceAddress", map,
                  reinterpret_cast<void*>(expected_parameters.address + 16));
    EXPECT_SUCCESS("cuTensorMapReplaceAddress", map, reinterpret_cast<void*>(expected_parameters.address));
    CHECK(parameters.map.words == expected_parameters.map.words);
    Map invalid_map;
    EXPECT_RESULT(invalid_value, "cuTensorMapReplaceAddress", static_cast<void*>(&invalid_map),
                  static_cast<void*>(nullptr));
}

} // namespace

int main() {
    EXPECT_RESULT(not_initialized, "cuTensorMapReplaceAddress", static_cast<void*>(nullptr),
                  static_cast<void*>(nullptr));
    use_primary_context();
    int is_supported = 0;
    EXPECT_SUCCESS("cuDeviceGetAttribute", &is_supported, int{device_tensor_map_access_supported}, Device{0});
    CHECK(is_supported == 1);
    test_valid_tensors_are_described();
    test_wrong_tiled_tensors_are_refused();
    test_wrong_im2col_tensors_are_refused();
    test_address_is_replaced();
}
