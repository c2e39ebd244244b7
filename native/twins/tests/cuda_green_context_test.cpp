// Tests of the software twin of libcuda: green contexts, which use only some multiprocessors of a device, and the
// resources from which a program creates them.
#include "cuda/device.hpp"
#include "cuda/green_context.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr int multiprocessor_resource = resource_multiprocessors;

DeviceResource query_device_resource(Device device = 0) {
    DeviceResource resource{};
    EXPECT_SUCCESS("cuDeviceGetDevResource", device, &resource, multiprocessor_resource);
    return resource;
}

// Split `input` into groups of at least `group_size_min` multiprocessors. `count` is the capacity of `parts`, and then
// the number of groups. `remainder` gets the other multiprocessors.
int split_resource(DeviceResource* parts, std::uint32_t* count, const DeviceResource& input, DeviceResource* remainder,
                   unsigned flags, unsigned group_size_min) {
    return call_driver("cuDevSmResourceSplitByCount", parts, count, &input, remainder, flags, group_size_min);
}

Handle make_descriptor(std::vector<DeviceResource> resources) {
    Handle descriptor = 0;
    EXPECT_SUCCESS("cuDevResourceGenerateDesc", &descriptor, resources.data(), static_cast<unsigned>(resources.size()));
    return descriptor;
}

Handle create_green_context(Handle descriptor) {
    Handle green_context = 0;
    EXPECT_SUCCESS("cuGreenCtxCreate", &green_context, descriptor, 0, green_context_default_stream_flag);
    return green_context;
}

// The device has 132 multiprocessors. The twin rounds the requested size of a group up to a multiple of 8, or to a
// multiple of 2 with the flag split_ignore_coscheduling.
void test_resource_is_split() {
    const DeviceResource device_resource = query_device_resource();
    CHECK(device_resource.count == multiprocessor_count && device_resource.partition_min == 8 &&
          device_resource.alignment == 8);
    std::uint32_t count = 0;
    // A call without an output array only counts the possible groups.
    CHECK(split_resource(nullptr, &count, device_resource, nullptr, 0, 0) == success && count == 16);
    CHECK(split_resource(nullptr, &count, device_resource, nullptr, 0, 9) == success && count == 8);
    CHECK(split_resource(nullptr, &count, device_resource, nullptr, split_ignore_coscheduling, 3) == success &&
          count == 33);
    DeviceResource groups[4] = {}, remainder{};
    count = 4;
    CHECK(split_resource(groups, &count, device_resource, &remainder, 0, 20) == success && count == 4);
    CHECK(groups[0].count == 24 && groups[3].count == 24 && remainder.count == 132 - 4 * 24);
    count = 3;
    CHECK(split_resource(groups, &count, device_resource, &remainder, split_ignore_coscheduling, 66) == success &&
          count == 2);
    CHECK(groups[0].count == 66 && remainder.type == resource_invalid);
}

void test_wrong_resources_are_refused() {
    DeviceResource resource = query_device_resource(), part{}, other_part{};
    std::uint32_t count = 1;
    Handle unused_handle = 0;
    EXPECT_RESULT(invalid_resource_type, "cuDeviceGetDevResource", 0, &resource, 1000);
    EXPECT_RESULT(invalid_device, "cuDeviceGetDevResource", 99, &resource, multiprocessor_resource);
    CHECK(split_resource(&part, nullptr, resource, nullptr, 0, 8) == invalid_value);
    CHECK(split_resource(&part, &count, resource, nullptr, 4, 8) == invalid_value); // 4 is not a flag
    CHECK(split_resource(&part, &count, resource, nullptr, 0, 133) == invalid_value);
    // A group of 130 multiprocessors would be rounded up to 136, but the device has 132.
    CHECK(split_resource(&part, &count, resource, nullptr, 0, 130) == invalid_resource_configuration);
    CHECK(split_resource(&part, &count, DeviceResource{}, nullptr, 0, 8) == invalid_resource_type);
    CHECK(split_resource(&part, &count, resource, nullptr, 0, 8) == success);
    CHECK(split_resource(&other_part, &count, part, nullptr, 0, 8) == invalid_resource_configuration);
    CHECK(split_resource(&other_part, &count, resource, nullptr, 0, 8) == success);
    // The resources of one descriptor must be different groups of one split.
    for (const DeviceResource& second_part : {part, other_part}) {
        const DeviceResource resource_pair[] = {part, second_part};
        EXPECT_RESULT(invalid_resource_configuration, "cuDevResourceGenerateDesc", &unused_handle,
                      static_cast<const DeviceResource*>(resource_pair), 2U);
    }
    EXPECT_RESULT(invalid_value, "cuDevResourceGenerateDesc", &unused_handle, static_cast<const DeviceResource*>(&part),
                  0U);
    const Handle descriptor = make_descriptor({part});
    EXPECT_RESULT(invalid_value, "cuGreenCtxCreate", &unused_handle, descriptor, 0, 0U);
    EXPECT_RESULT(invalid_value, "cuGreenCtxCreate", &unused_handle, Handle{5}, 0, green_context_default_stream_flag);
    EXPECT_RESULT(invalid_device, "cuGreenCtxCreate", &unused_handle, descriptor, 1, green_context_default_stream_flag);
    EXPECT_RESULT(invalid_context, "cuGreenCtxDestroy", Handle{5});
}

// A green context can have several parts of one split. Its resource is their sum, which a program can split again.
void test_green_context_has_its_resources() {
    DeviceResource parts[2] = {}, remainder{}, queried_resource{};
    std::uint32_t count = 2;
    CHECK(split_resource(parts, &count, query_device_resource(), &remainder, 0, 16) == success);
    const Handle green_context = create_green_context(make_descriptor({parts[0], remainder}));
    Handle context = 0;
    EXPECT_SUCCESS("cuCtxFromGreenCtx", &context, green_context);
    EXPECT_SUCCESS("cuGreenCtxGetDevResource", green_context, &queried_resource, multiprocessor_resource);
    CHECK(queried_resource.count == 16 + remainder.count);
    EXPECT_SUCCESS("cuCtxGetDevResource", context, &queried_resource, multiprocessor_resource);
    CHECK(queried_resource.count == 16 + remainder.count);
    CHECK(split_resource(parts, &count, queried_resource, nullptr, 0, 56) == success && count == 2);
    EXPECT_RESULT(invalid_context, "cuCtxDestroy_v2", context);
    EXPECT_SUCCESS("cuGreenCtxDestroy", green_context);
    EXPECT_RESULT(invalid_context, "cuCtxSetCurrent", context);
}

// Memory that a program allocates in a green context belongs to the primary context, and outlives the green
// context.
void test_green_context_copies(Handle primary_context) {
    const Handle green_context = create_green_context(make_descriptor({query_device_resource()}));
    Handle context = 0, stream = 0, queried_context = 0, queried_green_context = 0;
    EXPECT_SUCCESS("cuCtxFromGreenCtx", &context, green_context);
    // A stream of a green context must be a non-blocking stream.
    EXPECT_RESULT(invalid_value, "cuGreenCtxStreamCreate", &stream, green_context, 0U, 0);
    EXPECT_SUCCESS("cuGreenCtxStreamCreate", &stream, green_context, unsigned{stream_non_blocking}, 0);
    EXPECT_SUCCESS("cuStreamGetCtx", stream, &queried_context);
    CHECK(queried_context == context && queried_context != primary_context);
    EXPECT_SUCCESS("cuStreamGetCtx_v2", stream, &queried_context, &queried_green_context);
    CHECK(queried_context == primary_context && queried_green_context == green_context);
    EXPECT_SUCCESS("cuStreamGetGreenCtx", Handle{0}, &queried_green_context);
    CHECK(queried_green_context == 0);
    EXPECT_SUCCESS("cuCtxPushCurrent_v2", context);
    EXPECT_SUCCESS("cuStreamGetGreenCtx", Handle{0}, &queried_green_context);
    CHECK(queried_green_context == green_context);
    const u64 memory = allocate(1000);
    EXPECT_SUCCESS("cuCtxPopCurrent_v2", &queried_context);
    for (unsigned value = 1; value < 4; ++value) {
        EXPECT_SUCCESS("cuMemsetD8Async", memory, static_cast<unsigned char>(value), u64{1000}, stream);
        EXPECT_SUCCESS("cuCtxSynchronize"); // a wait for the primary context includes the green contexts
        EXPECT_SUCCESS("cuStreamQuery", stream);
    }
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    EXPECT_SUCCESS("cuGreenCtxDestroy", green_context);
    CHECK(read_device(memory, 1000)[999] == 3);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// A green context retains the primary context of its device.
void test_green_context_keeps_the_primary_context() {
    const Handle green_context = create_green_context(make_descriptor({query_device_resource()}));
    unsigned flags = 0;
    int is_active = 0;
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 0);
    EXPECT_SUCCESS("cuDevicePrimaryCtxGetState", 0, &flags, &is_active);
    CHECK(is_active == 1);
    EXPECT_SUCCESS("cuGreenCtxDestroy", green_context);
    EXPECT_SUCCESS("cuDevicePrimaryCtxGetState", 0, &flags, &is_active);
    CHECK(is_active == 0);
}

} // namespace

int main() {
    const Handle primary_context = use_primary_context();
    test_resource_is_split();
    test_wrong_resources_are_refused();
    test_green_context_has_its_resources();
    test_green_context_copies(primary_context);
    test_green_context_keeps_the_primary_context();
}
