// Tests of the software twin of libcuda: which parameters the functions that encode tensor maps accept and refuse.
#include <array>
#include <cstring>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr int type_uint8 = 0, type_float32 = 7, type_16u4_align8 = 13, type_16u6_align16 = 15;

struct alignas(128) Map {
    std::array<u64, 16> words{};
};

// Valid parameters for a tensor of 64 x 32 x 8 floats. Each case changes some of them.
struct Parameters {
    Map map;
    int type = type_float32;
    std::uint32_t rank = 3;
    u64 address = 0x700000000;
    std::array<u64, 5> extents{64, 32, 8, 4, 2};
    std::array<u64, 4> strides_bytes{256, 8192, 65536, 262144};
    std::array<std::uint32_t, 5> box{32, 4, 1, 1, 1}, element_strides{1, 1, 1, 1, 1};
    std::array<int, 3> lower{0, 0, 0}, upper{0, 0, 0};
    std::uint32_t channels = 64, pixels = 16;
    int interleave = 0, swizzle = 0, promotion = 0, fill = 0;

    int encode_tiled() {
        return call_driver("cuTensorMapEncodeTiled", static_cast<void*>(&map), type, rank,
                           reinterpret_cast<void*>(address), static_cast<const u64*>(extents.data()),
                           static_cast<const u64*>(strides_bytes.data()), static_cast<const std::uint32_t*>(box.data()),
                           static_cast<const std::uint32_t*>(element_strides.data()), interleave, swizzle, promotion,
                           fill);
    }

    int encode_im2col() {
        return call_driver(
            "cuTensorMapEncodeIm2col", static_cast<void*>(&map), type, rank, reinterpret_cast<void*>(address),
            static_cast<const u64*>(extents.data()), static_cast<const u64*>(strides_bytes.data()),
            static_cast<const int*>(lower.data()), static_cast<const int*>(upper.data()), channels, pixels,
            static_cast<const std::uint32_t*>(element_strides.data()), interleave, swizzle, promotion, fill);
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
    // Without interleaving, the stride of the first dimension is ignored.
    CHECK(encode_tiled_with([](Parameters& p) { p.element_strides[0] = 9; }) == success);
    CHECK(encode_tiled_with([](Parameters& p) { p.type = type_16u6_align16, p.extents[0] = 128, p.box[0] = 128; }) ==
          success);
    CHECK(encode_im2col_with([](Parameters&) {}) == success);
    CHECK(encode_im2col_with([](Parameters& p) {
              p.rank = 5, p.lower = {-16, -16, -1}, p.upper = {15, 0, -1};
          }) == success);
}

void test_wrong_tiled_tensors_are_refused() {
    CHECK(encode_tiled_with([](Parameters& p) { p.rank = 0; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.rank = 6; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.rank = 2, p.interleave = 1; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.type = 16; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.address += 8; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.address += 16; }) == success);
    CHECK(encode_tiled_with([](Parameters& p) { p.address += 16, p.interleave = 2, p.swizzle = 1; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.extents[2] = 0; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.extents[2] = (u64{1} << 32) + 1; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.type = type_16u4_align8, p.extents[0] = 63; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.type = type_16u6_align16, p.box[0] = 128; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.strides_bytes[1] = 8200; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.strides_bytes[1] = u64{1} << 40; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.box[0] = 3; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.box[1] = 0; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.box[1] = 257; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.element_strides[1] = 0; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.element_strides[1] = 9; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.element_strides[0] = 9, p.interleave = 1; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.interleave = 3; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.interleave = 2; }) ==
          invalid_value);                                                            // it needs a swizzle of 32 bytes
    CHECK(encode_tiled_with([](Parameters& p) { p.swizzle = 2; }) == invalid_value); // a row of the box has 128 bytes
    CHECK(encode_tiled_with([](Parameters& p) { p.swizzle = 7; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.promotion = 4; }) == invalid_value);
    CHECK(encode_tiled_with([](Parameters& p) { p.fill = 1, p.type = type_uint8; }) == invalid_value);
    Parameters valid;
    alignas(128) std::array<std::byte, 256> memory{};
    EXPECT_RESULT(invalid_value, "cuTensorMapEncodeTiled", static_cast<void*>(memory.data() + 32), valid.type,
                  valid.rank, reinterpret_cast<void*>(valid.address), static_cast<const u64*>(valid.extents.data()),
                  static_cast<const u64*>(valid.strides_bytes.data()),
                  static_cast<const std::uint32_t*>(valid.box.data()),
                  static_cast<const std::uint32_t*>(valid.element_strides.data()), 0, 0, 0, 0);
}

void test_wrong_im2col_tensors_are_refused() {
    CHECK(encode_im2col_with([](Parameters& p) { p.rank = 2; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.channels = 257; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.pixels = 1025; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.lower[0] = -32769; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.rank = 4, p.upper[1] = 128; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.rank = 5, p.upper[1] = 16; }) == invalid_value);
    CHECK(encode_im2col_with([](Parameters& p) { p.lower[0] = 32; }) == invalid_value); // no pixel is left
    CHECK(encode_im2col_with([](Parameters& p) { p.swizzle = 3; }) == invalid_value);   // a pixel has 256 bytes
}

// The function changes only the address of a map. The new address must be aligned like the old address.
void test_address_is_replaced() {
    Parameters parameters, other_parameters;
    parameters.interleave = 2;
    parameters.swizzle = 1;
    other_parameters = parameters;
    other_parameters.address = 0x800000000;
    CHECK(parameters.encode_tiled() == success && other_parameters.encode_tiled() == success);
    CHECK(parameters.map.words != other_parameters.map.words);
    void* const map = &parameters.map;
    EXPECT_RESULT(invalid_value, "cuTensorMapReplaceAddress", map,
                  reinterpret_cast<void*>(other_parameters.address + 16));
    EXPECT_SUCCESS("cuTensorMapReplaceAddress", map, reinterpret_cast<void*>(other_parameters.address));
    CHECK(parameters.map.words == other_parameters.map.words);
    Map empty;
    EXPECT_RESULT(invalid_value, "cuTensorMapReplaceAddress", static_cast<void*>(&empty), static_cast<void*>(nullptr));
}

} // namespace

int main() {
    EXPECT_RESULT(not_initialized, "cuTensorMapReplaceAddress", static_cast<void*>(nullptr),
                  static_cast<void*>(nullptr));
    init_device();
    int is_supported = 0;
    EXPECT_SUCCESS("cuDeviceGetAttribute", &is_supported, int{device_tensor_map_access_supported}, Device{0});
    CHECK(is_supported == 1);
    test_valid_tensors_are_described();
    test_wrong_tiled_tensors_are_refused();
    test_wrong_im2col_tensors_are_refused();
    test_address_is_replaced();
}
