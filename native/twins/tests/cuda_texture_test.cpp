// Tests of the software twin of libcuda: texture objects and surface objects.
#include "cuda/array_abi.hpp"
#include "cuda/texture.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

Handle create_array(unsigned flags) {
    // The members are the width, height and depth, the format and number of the channels, and the flags.
    const ArrayDescription description{16, 8, 0, format_float, 1, flags};
    Handle array = 0;
    EXPECT_SUCCESS("cuArray3DCreate_v2", &array, &description);
    return array;
}

ResourceDescription describe_resource(int type, Handle array) {
    ResourceDescription resource{};
    resource.type = type;
    resource.array = array;
    return resource;
}

int create_texture(Handle* texture, const ResourceDescription& resource, const TextureDescription& description,
                   const ViewDescription* view = nullptr) {
    return call_driver("cuTexObjectCreate", texture, &resource, &description, view);
}

void test_texture_of_an_array_keeps_its_descriptions() {
    const Handle array = create_array(0);
    Handle texture = 0;
    TextureDescription description{}, queried_description{};
    description.address_modes[0] = 3; // CU_TR_ADDRESS_MODE_BORDER
    description.filter_mode = 1;      // CU_TR_FILTER_MODE_LINEAR
    description.border[2] = 0.5F;
    // The members of a view begin with the format, width, height and depth.
    const ViewDescription view{1, 16, 8, 0, 0, 0, 0, 0, {}};
    ViewDescription queried_view{};
    ResourceDescription resource{};
    CHECK(create_texture(&texture, describe_resource(resource_array, array), description, &view) == success);
    EXPECT_SUCCESS("cuTexObjectGetResourceDesc", &resource, texture);
    CHECK(resource.type == resource_array && resource.array == array);
    EXPECT_SUCCESS("cuTexObjectGetTextureDesc", &queried_description, texture);
    CHECK(queried_description.address_modes[0] == 3 && queried_description.filter_mode == 1 &&
          queried_description.border[2] == 0.5F);
    EXPECT_SUCCESS("cuTexObjectGetResourceViewDesc", &queried_view, texture);
    CHECK(queried_view.width == 16 && queried_view.height == 8);
    EXPECT_SUCCESS("cuTexObjectDestroy", texture);
    EXPECT_RESULT(invalid_value, "cuTexObjectGetTextureDesc", &queried_description, texture);
    CHECK(create_texture(&texture, describe_resource(resource_array, array), description) == success);
    EXPECT_RESULT(invalid_value, "cuTexObjectGetResourceViewDesc", &queried_view, texture);
    EXPECT_SUCCESS("cuTexObjectDestroy", texture);
    EXPECT_SUCCESS("cuArrayDestroy", array);
    CHECK(create_texture(&texture, describe_resource(resource_array, array), description) == invalid_value);
}

// The memory of a texture must be aligned to 512 bytes and must contain all rows. An element has 1, 2 or 4 channels.
// The members of a linear resource are the address, format, number of channels and length in bytes. A pitched resource
// has instead of the length the width, height and pitch of its rows.
void test_texture_of_memory_is_checked() {
    const u64 memory = allocate(4096);
    Handle texture = 0;
    ResourceDescription linear_resource{}, rows_resource{};
    linear_resource.type = resource_linear;
    linear_resource.linear = {memory, format_float, 2, 4096};
    rows_resource.type = resource_pitch;
    rows_resource.rows = {memory, format_unsigned_8, 4, 100, 8, 512};
    CHECK(create_texture(&texture, linear_resource, {}) == success);
    EXPECT_SUCCESS("cuTexObjectDestroy", texture);
    CHECK(create_texture(&texture, rows_resource, {}) == success);
    EXPECT_SUCCESS("cuTexObjectDestroy", texture);
    // Only a texture of an array can have a view.
    const ViewDescription view{};
    CHECK(create_texture(&texture, linear_resource, {}, &view) == invalid_value);
    linear_resource.linear.length_bytes = 4097;
    CHECK(create_texture(&texture, linear_resource, {}) == invalid_value);
    linear_resource.linear = {memory + 4, format_float, 1, 16};
    CHECK(create_texture(&texture, linear_resource, {}) == invalid_value);
    linear_resource.linear = {memory, format_float, 3, 16};
    CHECK(create_texture(&texture, linear_resource, {}) == invalid_value);
    rows_resource.rows.height = 9;
    CHECK(create_texture(&texture, rows_resource, {}) == invalid_value);
    rows_resource.rows.height = 1;
    rows_resource.rows.pitch_bytes = 399; // a row has 400 bytes
    CHECK(create_texture(&texture, rows_resource, {}) == invalid_value);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

void test_wrong_textures_are_refused() {
    const Handle array = create_array(0);
    Handle texture = 0, mipmap = 0;
    ResourceDescription resource = describe_resource(resource_array, array);
    TextureDescription description{};
    description.address_modes[2] = 4; // not an address mode
    CHECK(create_texture(&texture, resource, description) == invalid_value);
    description = {};
    description.flags = 4; // not a flag
    CHECK(create_texture(&texture, resource, description) == invalid_value);
    description = {};
    description.filter_mode = 2; // not a filter mode
    CHECK(create_texture(&texture, resource, description) == invalid_value);
    resource.flags = 1; // must be 0
    CHECK(create_texture(&texture, resource, {}) == invalid_value);
    // 4 is not a type of a resource, and `array` is not a mipmapped array.
    CHECK(create_texture(&texture, describe_resource(4, array), {}) == invalid_value);
    CHECK(create_texture(&texture, describe_resource(resource_mipmap, array), {}) == invalid_value);
    // The coordinates of a mipmapped array must be normalized.
    const ArrayDescription mipmap_description{16, 8, 0, format_float, 1, 0};
    EXPECT_SUCCESS("cuMipmappedArrayCreate", &mipmap, &mipmap_description, 2U);
    description = {};
    CHECK(create_texture(&texture, describe_resource(resource_mipmap, mipmap), description) == invalid_value);
    description.flags = texture_normalized_coordinates;
    CHECK(create_texture(&texture, describe_resource(resource_mipmap, mipmap), description) == success);
    EXPECT_SUCCESS("cuTexObjectDestroy", texture);
    EXPECT_SUCCESS("cuMipmappedArrayDestroy", mipmap);
    EXPECT_SUCCESS("cuArrayDestroy", array);
}

// A surface needs an array that was created with the flag array_surface.
void test_surface_of_an_array() {
    const Handle array = create_array(array_surface), array_without_surface_flag = create_array(0);
    Handle surface = 0;
    ResourceDescription resource = describe_resource(resource_array, array_without_surface_flag), queried_resource{};
    EXPECT_RESULT(invalid_value, "cuSurfObjectCreate", &surface, static_cast<const ResourceDescription*>(&resource));
    resource.array = array;
    EXPECT_SUCCESS("cuSurfObjectCreate", &surface, static_cast<const ResourceDescription*>(&resource));
    EXPECT_SUCCESS("cuSurfObjectGetResourceDesc", &queried_resource, surface);
    CHECK(queried_resource.array == array);
    EXPECT_SUCCESS("cuSurfObjectDestroy", surface);
    EXPECT_RESULT(invalid_value, "cuSurfObjectGetResourceDesc", &queried_resource, surface);
    EXPECT_SUCCESS("cuArrayDestroy", array);
    EXPECT_SUCCESS("cuArrayDestroy", array_without_surface_flag);
}

// The destruction of a context destroys its textures. A later cuTexObjectDestroy fails.
void test_texture_ends_with_its_context() {
    Handle context = 0, texture = 0;
    EXPECT_SUCCESS("cuCtxCreate_v2", &context, 0U, 0);
    CHECK(create_texture(&texture, describe_resource(resource_array, create_array(0)), {}) == success);
    EXPECT_SUCCESS("cuCtxDestroy_v2", context);
    EXPECT_RESULT(invalid_value, "cuTexObjectDestroy", texture);
}

} // namespace

int main() {
    use_primary_context();
    test_texture_of_an_array_keeps_its_descriptions();
    test_texture_of_memory_is_checked();
    test_wrong_textures_are_refused();
    test_surface_of_an_array();
    test_texture_ends_with_its_context();
}
