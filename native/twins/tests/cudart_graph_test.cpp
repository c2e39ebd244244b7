// Tests of the software twins of libcudart (the CUDA runtime 12 and 13): captures, graphs, arrays and managed memory.
#include <algorithm>

#include "cuda/array_abi.hpp"
#include "cuda/graph_abi.hpp"
#include "cudart_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cudart;
using cuda::make_pattern;

namespace {

constexpr u64 buffer_bytes = 1000;

Handle create_stream() {
    Handle stream = 0;
    EXPECT_OK("cudaStreamCreateWithFlags", &stream, 1U); // cudaStreamNonBlocking
    return stream;
}

void launch_twice_and_destroy(Handle graph, Handle stream) {
    Handle executable = 0;
    EXPECT_OK("cudaGraphInstantiate", &executable, graph, u64{0});
    for (int round = 0; round < 2; ++round) {
        EXPECT_OK("cudaGraphLaunch", executable, stream);
        EXPECT_OK("cudaStreamSynchronize", stream);
    }
    EXPECT_OK("cudaGraphExecDestroy", executable);
    EXPECT_OK("cudaGraphDestroy", graph);
}

// As PyTorch does, the test captures copies of a stream once, and launches the graph several times with new data in the
// same memory.
void test_captured_copies_are_launched() {
    const Handle stream = create_stream();
    void *const source_memory = allocate(buffer_bytes), *const target_memory = allocate(buffer_bytes);
    int capture_status = -1;
    u64 capture_id = 0, dependency_count = 0;
    Handle graph = 0, captured_graph = 0;
    const Handle* dependencies = nullptr;
    EXPECT_OK("cudaStreamBeginCapture", stream, int{cuda::capture_mode_global});
    EXPECT_OK("cudaMemcpyAsync", target_memory, static_cast<const void*>(source_memory), buffer_bytes,
              int{device_to_device}, stream);
    EXPECT_OK("cudaMemsetAsync", source_memory, 0, buffer_bytes, stream);
#if GDRKIT_CUDART_MAJOR == 12
    EXPECT_OK("cudaStreamGetCaptureInfo_v2", stream, &capture_status, &capture_id, &captured_graph, &dependencies,
              &dependency_count);
#else
    const cuda::EdgeData* edge_data = nullptr;
    EXPECT_OK("cudaStreamGetCaptureInfo", stream, &capture_status, &capture_id, &captured_graph, &dependencies,
              &edge_data, &dependency_count);
#endif
    CHECK(capture_status == cuda::capture_active && capture_id != 0 && dependency_count == 1);
    EXPECT_OK("cudaStreamEndCapture", stream, &graph);
    CHECK(graph == captured_graph);
    EXPECT_OK("cudaStreamIsCapturing", stream, &capture_status);
    CHECK(capture_status == cuda::capture_none);
    Handle executable = 0;
    EXPECT_OK("cudaGraphInstantiateWithFlags", &executable, graph, u64{0});
    for (unsigned seed = 1; seed < 4; ++seed) {
        write_memory(source_memory, make_pattern(buffer_bytes, seed));
        EXPECT_OK("cudaGraphLaunch", executable, stream);
        EXPECT_OK("cudaStreamSynchronize", stream);
        CHECK(read_memory(target_memory, buffer_bytes) == make_pattern(buffer_bytes, seed));
        CHECK(read_memory(source_memory, buffer_bytes)[9] == 0);
    }
    EXPECT_OK("cudaGraphExecDestroy", executable);
    EXPECT_OK("cudaGraphDestroy", graph);
    EXPECT_OK("cudaFree", source_memory);
    EXPECT_OK("cudaFree", target_memory);
    EXPECT_OK("cudaStreamDestroy", stream);
}

void test_errors_of_captures() {
    const Handle stream = create_stream();
    void* pointer = nullptr;
    Handle graph = 1;
    EXPECT_ERROR(cuda::stream_capture_unsupported, "cudaStreamBeginCapture", Handle{0}, 0);
    EXPECT_OK("cudaStreamBeginCapture", stream, 0);
    EXPECT_ERROR(cuda::stream_capture_unsupported, "cudaMalloc", &pointer, buffer_bytes);
    EXPECT_ERROR(cuda::stream_capture_invalidated, "cudaStreamEndCapture", stream, &graph);
    CHECK(graph == 0);
    EXPECT_ERROR(cuda::stream_capture_invalidated, "cudaGetLastError");
    EXPECT_OK("cudaStreamDestroy", stream);
}

void test_graphs_are_built_by_nodes() {
    const Handle stream = create_stream();
    void* const memory = allocate(buffer_bytes);
    std::vector<unsigned char> source_bytes = make_pattern(buffer_bytes, 5), copied_bytes(buffer_bytes);
    Handle graph = 0, fill_node = 0, copy_node = 0, read_node = 0, empty_node = 0;
    EXPECT_OK("cudaGraphCreate", &graph, 0U);
    const Handle* const no_nodes = nullptr;
    const cuda::FillParameters fill_parameters{reinterpret_cast<u64>(memory), 0, 1, 1, buffer_bytes, 1};
    EXPECT_OK("cudaGraphAddMemsetNode", &fill_node, graph, no_nodes, u64{0}, &fill_parameters);
    EXPECT_OK("cudaGraphAddMemcpyNode1D", &copy_node, graph, static_cast<const Handle*>(&fill_node), u64{1}, memory,
              static_cast<const void*>(source_bytes.data()), u64{100}, int{host_to_device});
    // Each side of a Copy3d is an array, a position, and memory with its pitch, width and height.
    const Copy3d read_copy{nullptr,
                           {},
                           {memory, buffer_bytes, buffer_bytes, 1},
                           nullptr,
                           {},
                           {copied_bytes.data(), buffer_bytes, buffer_bytes, 1},
                           {buffer_bytes, 1, 1},
                           device_to_host};
    EXPECT_OK("cudaGraphAddMemcpyNode", &read_node, graph, static_cast<const Handle*>(&copy_node), u64{1}, &read_copy);
    EXPECT_OK("cudaGraphAddEmptyNode", &empty_node, graph, static_cast<const Handle*>(&read_node), u64{1});
    Copy3d queried_copy{};
    EXPECT_OK("cudaGraphMemcpyNodeGetParams", read_node, &queried_copy);
    CHECK(queried_copy.from.pointer == memory && queried_copy.extent.width == buffer_bytes);
    u64 node_count = 0;
    EXPECT_OK("cudaGraphGetNodes", graph, static_cast<Handle*>(nullptr), &node_count);
    CHECK(node_count == 4);
    int node_type = 0;
    EXPECT_OK("cudaGraphNodeGetType", fill_node, &node_type);
    CHECK(node_type == cuda::node_fill);
    launch_twice_and_destroy(graph, stream);
    CHECK(std::equal(source_bytes.begin(), source_bytes.begin() + 100, copied_bytes.begin()) &&
          copied_bytes[100] == 1 && copied_bytes[buffer_bytes - 1] == 1);
    EXPECT_OK("cudaFree", memory);
    EXPECT_OK("cudaStreamDestroy", stream);
}

// A conditional node runs the graph that its condition chooses.
void test_conditional_node_runs_one_graph() {
    const Handle stream = create_stream();
    void* const memory = allocate(buffer_bytes);
    Handle graph = 0, condition = 0, conditional_node = 0;
    EXPECT_OK("cudaGraphCreate", &graph, 0U);
    EXPECT_OK("cudaGraphConditionalHandleCreate", &condition, graph, 1U, cuda::condition_assign_default);
    cuda::NodeParameterUnion parameters{};
    parameters.type = cuda::node_conditional;
    parameters.conditional = {condition, cuda::conditional_switch, 2, nullptr, 0};
#if GDRKIT_CUDART_MAJOR == 12
    EXPECT_OK("cudaGraphAddNode", &conditional_node, graph, static_cast<const Handle*>(nullptr), u64{0}, &parameters);
#else
    EXPECT_OK("cudaGraphAddNode", &conditional_node, graph, static_cast<const Handle*>(nullptr),
              static_cast<const cuda::EdgeData*>(nullptr), u64{0}, &parameters);
    // The twin supports only edges with default data. Here, from_port is 1.
    const cuda::EdgeData non_default_edge_data{1, 0, 0, {}};
    Handle refused_node = 0;
    EXPECT_ERROR(invalid_value, "cudaGraphAddNode", &refused_node, graph, &conditional_node, &non_default_edge_data,
                 u64{1}, &parameters);
#endif
    for (unsigned index = 0; index < 2; ++index) {
        const cuda::FillParameters fill_parameters{reinterpret_cast<u64>(memory), 0, index + 1, 1, buffer_bytes, 1};
        Handle fill_node = 0;
        EXPECT_OK("cudaGraphAddMemsetNode", &fill_node, parameters.conditional.bodies[index],
                  static_cast<const Handle*>(nullptr), u64{0}, &fill_parameters);
    }
    launch_twice_and_destroy(graph, stream);
    CHECK(read_memory(memory, buffer_bytes) == std::vector<unsigned char>(buffer_bytes, 2));
    EXPECT_OK("cudaFree", memory);
    EXPECT_OK("cudaStreamDestroy", stream);
}

// In a copy with an array, positions and extents count elements. An element has two channels of 16 bits, so 4 bytes.
void test_arrays_are_copied() {
    constexpr u64 width = 20, height = 5, row_bytes = width * 4;
    const ChannelFormat format{16, 16, 0, 0, channel_unsigned};
    Handle array = 0, volume_array = 0, mipmap = 0, level_array = 0;
    EXPECT_OK("cudaMallocArray", &array, &format, u64{width}, u64{height}, 0U);
    std::vector<unsigned char> source_bytes = make_pattern(row_bytes * height, 6), copied_bytes(source_bytes.size());
    EXPECT_OK("cudaMemcpy2DToArray", array, u64{0}, u64{0}, static_cast<const void*>(source_bytes.data()),
              u64{row_bytes}, u64{row_bytes}, u64{height}, int{host_to_device});
    EXPECT_OK("cudaMemcpy2DFromArray", static_cast<void*>(copied_bytes.data()), u64{row_bytes}, array, u64{0}, u64{0},
              u64{row_bytes}, u64{height}, int{device_to_host});
    CHECK(copied_bytes == source_bytes);
    EXPECT_OK("cudaMalloc3DArray", &volume_array, &format, Extent{width, height, 2}, 0U);
    const auto to_pointer = [](Handle handle) { return reinterpret_cast<void*>(handle); };
    Copy3d copy{to_pointer(array), {1, 1, 0},       {}, to_pointer(volume_array), {2, 2, 1}, {},
                {width - 2, 3, 1}, device_to_device};
    EXPECT_OK("cudaMemcpy3D", static_cast<const Copy3d*>(&copy));
    copy = {
        to_pointer(volume_array), {2, 2, 1},     {}, nullptr, {}, {copied_bytes.data(), row_bytes, row_bytes, height},
        {width - 2, 3, 1},        device_to_host};
    EXPECT_OK("cudaMemcpy3D_ptds", static_cast<const Copy3d*>(&copy));
    CHECK(
        std::equal(copied_bytes.begin(), copied_bytes.begin() + (width - 2) * 4, source_bytes.begin() + row_bytes + 4));
    EXPECT_OK("cudaMemcpyToArray", array, u64{4}, u64{1}, static_cast<const void*>(source_bytes.data()), u64{row_bytes},
              int{host_to_device});
    EXPECT_OK("cudaMemcpyFromArray_ptds", static_cast<void*>(copied_bytes.data()), array, u64{4}, u64{1},
              u64{row_bytes}, int{device_to_host});
    CHECK(std::equal(source_bytes.begin(), source_bytes.begin() + row_bytes, copied_bytes.begin()));
    ChannelFormat queried_format{};
    Extent extent{};
    unsigned flags = 9;
    EXPECT_OK("cudaArrayGetInfo", &queried_format, &extent, &flags, volume_array);
    CHECK(queried_format.x == 16 && queried_format.y == 16 && queried_format.z == 0 &&
          queried_format.kind == channel_unsigned && extent.depth == 2 && flags == 0);
    EXPECT_OK("cudaMallocMipmappedArray", &mipmap, &format, Extent{width, height, 0}, 3U, 0U);
    EXPECT_OK("cudaGetMipmappedArrayLevel", &level_array, mipmap, 1U);
    EXPECT_OK("cudaArrayGetInfo", &queried_format, &extent, &flags, level_array);
    CHECK(extent.width == width / 2 && extent.height == height / 2);
    // All channels of an element must have the same number of bits.
    const ChannelFormat uneven_format{8, 16, 0, 0, channel_unsigned};
    EXPECT_ERROR(invalid_channel_descriptor, "cudaMallocArray", &level_array, &uneven_format, u64{width}, u64{height},
                 0U);
    EXPECT_OK("cudaFreeMipmappedArray", mipmap);
    EXPECT_OK("cudaFreeArray", array);
    EXPECT_OK("cudaFreeArray", volume_array);
    EXPECT_OK("cudaFreeArray", Handle{0});
}

void test_pools_of_the_host_and_memory_of_graphs() {
    u64 used_bytes = 9;
    EXPECT_OK("cudaDeviceGetGraphMemAttribute", 0, 0,
              static_cast<void*>(&used_bytes)); // cudaGraphMemAttrUsedMemCurrent
    CHECK(used_bytes == 0);
    EXPECT_OK("cudaDeviceGraphMemTrim", 0);
    EXPECT_OK("cudaProfilerStart");
    EXPECT_OK("cudaProfilerStop");
#if GDRKIT_CUDART_MAJOR == 13
    const cuda::Location host_location{cuda::location_host, 0};
    Handle pool = 0, current_pool = 0;
    EXPECT_OK("cudaMemGetDefaultMemPool", &pool, &host_location, int{cuda::allocation_pinned});
    EXPECT_OK("cudaMemGetMemPool", &current_pool, &host_location, int{cuda::allocation_pinned});
    CHECK(pool != 0 && pool == current_pool);
    EXPECT_OK("cudaMemSetMemPool", &host_location, int{cuda::allocation_pinned}, pool);
#endif
}

void test_managed_memory_is_prefetched() {
    void* memory = nullptr;
    const cuda::Location device_location{cuda::location_device, 1};
    EXPECT_OK("cudaMallocManaged", &memory, buffer_bytes, 1U); // cudaMemAttachGlobal
    const void* const constant_memory = memory;
#if GDRKIT_CUDART_MAJOR == 12
    EXPECT_OK("cudaMemPrefetchAsync", constant_memory, buffer_bytes, 0, Handle{0});
    EXPECT_OK("cudaMemAdvise", constant_memory, buffer_bytes, int{cuda::advise_set_accessed_by}, 0);
    EXPECT_OK("cudaMemPrefetchAsync_v2", constant_memory, buffer_bytes, device_location, 0U, Handle{0});
    EXPECT_OK("cudaMemAdvise_v2", constant_memory, buffer_bytes, int{cuda::advise_set_preferred_location},
              device_location);
#else
    EXPECT_OK("cudaMemPrefetchAsync", constant_memory, buffer_bytes, device_location, 0U, Handle{0});
    EXPECT_OK("cudaMemAdvise", constant_memory, buffer_bytes, int{cuda::advise_set_preferred_location},
              device_location);
#endif
    for (const int attribute : {cuda::range_preferred_location, cuda::range_last_prefetch_location}) {
        int device_ordinal = -9;
        EXPECT_OK("cudaMemRangeGetAttribute", static_cast<void*>(&device_ordinal), u64{4}, attribute, constant_memory,
                  buffer_bytes);
        CHECK(device_ordinal == 1);
    }
    EXPECT_OK("cudaStreamAttachMemAsync", Handle{0}, memory, u64{0}, 2U); // cudaMemAttachHost
    EXPECT_OK("cudaDeviceSynchronize");
    EXPECT_OK("cudaFree", memory);
}

} // namespace

int main() {
    test_captured_copies_are_launched();
    test_errors_of_captures();
    test_graphs_are_built_by_nodes();
    test_conditional_node_runs_one_graph();
    test_arrays_are_copied();
    test_pools_of_the_host_and_memory_of_graphs();
    test_managed_memory_is_prefetched();
}
