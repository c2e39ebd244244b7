// Tests of the software twins of libcudart (the CUDA runtime 12 and 13): captures, graphs, arrays and managed memory.
#include <algorithm>

#include "cuda/array_abi.hpp"
#include "cuda/graph_abi.hpp"
#include "cudart_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cudart;
using cuda::make_pattern;

namespace {

constexpr u64 length_bytes = 1000;

Handle create_stream() {
    Handle stream = 0;
    EXPECT_OK("cudaStreamCreateWithFlags", &stream, 1U);
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

// Like PyTorch, the test captures copies in a stream, and launches them with other data in the same memory.
void test_captured_copies_are_launched() {
    const Handle stream = create_stream();
    void *const first = allocate(length_bytes), *const second = allocate(length_bytes);
    int status = -1;
    u64 capture_id = 0, dependencies_count = 0;
    Handle graph = 0, captured_graph = 0;
    const Handle* dependencies = nullptr;
    EXPECT_OK("cudaStreamBeginCapture", stream, int{cuda::capture_mode_global});
    EXPECT_OK("cudaMemcpyAsync", second, static_cast<const void*>(first), length_bytes, int{device_to_device}, stream);
    EXPECT_OK("cudaMemsetAsync", first, 0, length_bytes, stream);
#if GDRKIT_CUDART_MAJOR == 12
    EXPECT_OK("cudaStreamGetCaptureInfo_v2", stream, &status, &capture_id, &captured_graph, &dependencies,
              &dependencies_count);
#else
    const cuda::EdgeData* edge_data = nullptr;
    EXPECT_OK("cudaStreamGetCaptureInfo", stream, &status, &capture_id, &captured_graph, &dependencies, &edge_data,
              &dependencies_count);
#endif
    CHECK(status == cuda::capture_active && capture_id != 0 && dependencies_count == 1);
    EXPECT_OK("cudaStreamEndCapture", stream, &graph);
    CHECK(graph == captured_graph);
    EXPECT_OK("cudaStreamIsCapturing", stream, &status);
    CHECK(status == cuda::capture_none);
    Handle executable = 0;
    EXPECT_OK("cudaGraphInstantiateWithFlags", &executable, graph, u64{0});
    for (unsigned seed = 1; seed < 4; ++seed) {
        write_memory(first, make_pattern(length_bytes, seed));
        EXPECT_OK("cudaGraphLaunch", executable, stream);
        EXPECT_OK("cudaStreamSynchronize", stream);
        CHECK(read_memory(second, length_bytes) == make_pattern(length_bytes, seed));
        CHECK(read_memory(first, length_bytes)[9] == 0);
    }
    EXPECT_OK("cudaGraphExecDestroy", executable);
    EXPECT_OK("cudaGraphDestroy", graph);
    EXPECT_OK("cudaFree", first);
    EXPECT_OK("cudaFree", second);
    EXPECT_OK("cudaStreamDestroy", stream);
}

void test_errors_of_captures() {
    const Handle stream = create_stream();
    void* pointer = nullptr;
    Handle graph = 1;
    EXPECT_ERROR(cuda::stream_capture_unsupported, "cudaStreamBeginCapture", Handle{0}, 0);
    EXPECT_OK("cudaStreamBeginCapture", stream, 0);
    EXPECT_ERROR(cuda::stream_capture_unsupported, "cudaMalloc", &pointer, length_bytes);
    EXPECT_ERROR(cuda::stream_capture_invalidated, "cudaStreamEndCapture", stream, &graph);
    CHECK(graph == 0);
    EXPECT_ERROR(cuda::stream_capture_invalidated, "cudaGetLastError");
    EXPECT_OK("cudaStreamDestroy", stream);
}

void test_graphs_are_built_by_nodes() {
    const Handle stream = create_stream();
    void* const memory = allocate(length_bytes);
    std::vector<unsigned char> from = make_pattern(length_bytes, 5), to(length_bytes);
    Handle graph = 0, fill_node = 0, copy_node = 0, read_node = 0, empty_node = 0;
    EXPECT_OK("cudaGraphCreate", &graph, 0U);
    const Handle* const no_nodes = nullptr;
    const cuda::FillParameters parameters{reinterpret_cast<u64>(memory), 0, 1, 1, length_bytes, 1};
    EXPECT_OK("cudaGraphAddMemsetNode", &fill_node, graph, no_nodes, u64{0}, &parameters);
    EXPECT_OK("cudaGraphAddMemcpyNode1D", &copy_node, graph, static_cast<const Handle*>(&fill_node), u64{1}, memory,
              static_cast<const void*>(from.data()), u64{100}, int{host_to_device});
    const Copy3d read_copy{nullptr,
                           {},
                           {memory, length_bytes, length_bytes, 1},
                           nullptr,
                           {},
                           {to.data(), length_bytes, length_bytes, 1},
                           {length_bytes, 1, 1},
                           device_to_host};
    EXPECT_OK("cudaGraphAddMemcpyNode", &read_node, graph, static_cast<const Handle*>(&copy_node), u64{1}, &read_copy);
    EXPECT_OK("cudaGraphAddEmptyNode", &empty_node, graph, static_cast<const Handle*>(&read_node), u64{1});
    Copy3d queried{};
    EXPECT_OK("cudaGraphMemcpyNodeGetParams", read_node, &queried);
    CHECK(queried.from.pointer == memory && queried.extent.width == length_bytes);
    u64 count = 0;
    EXPECT_OK("cudaGraphGetNodes", graph, static_cast<Handle*>(nullptr), &count);
    CHECK(count == 4);
    int type = 0;
    EXPECT_OK("cudaGraphNodeGetType", fill_node, &type);
    CHECK(type == cuda::node_fill);
    launch_twice_and_destroy(graph, stream);
    CHECK(std::equal(from.begin(), from.begin() + 100, to.begin()) && to[100] == 1 && to[length_bytes - 1] == 1);
    EXPECT_OK("cudaFree", memory);
    EXPECT_OK("cudaStreamDestroy", stream);
}

// A conditional node runs the graph that its condition chooses.
void test_conditional_node_runs_one_graph() {
    const Handle stream = create_stream();
    void* const memory = allocate(length_bytes);
    Handle graph = 0, condition = 0, node = 0;
    EXPECT_OK("cudaGraphCreate", &graph, 0U);
    EXPECT_OK("cudaGraphConditionalHandleCreate", &condition, graph, 1U, cuda::condition_assign_default);
    cuda::NodeParameterUnion parameters{};
    parameters.type = cuda::node_conditional;
    parameters.conditional = {condition, cuda::conditional_switch, 2, nullptr, 0};
#if GDRKIT_CUDART_MAJOR == 12
    EXPECT_OK("cudaGraphAddNode", &node, graph, static_cast<const Handle*>(nullptr), u64{0}, &parameters);
#else
    EXPECT_OK("cudaGraphAddNode", &node, graph, static_cast<const Handle*>(nullptr),
              static_cast<const cuda::EdgeData*>(nullptr), u64{0}, &parameters);
#endif
    for (unsigned index = 0; index < 2; ++index) {
        const cuda::FillParameters fill{reinterpret_cast<u64>(memory), 0, index + 1, 1, length_bytes, 1};
        Handle inner = 0;
        EXPECT_OK("cudaGraphAddMemsetNode", &inner, parameters.conditional.bodies[index],
                  static_cast<const Handle*>(nullptr), u64{0}, &fill);
    }
    launch_twice_and_destroy(graph, stream);
    CHECK(read_memory(memory, length_bytes) == std::vector<unsigned char>(length_bytes, 2));
    EXPECT_OK("cudaFree", memory);
    EXPECT_OK("cudaStreamDestroy", stream);
}

// In a copy with an array, positions and extents count elements.
void test_arrays_are_copied() {
    constexpr u64 width = 20, height = 5, row_bytes = width * 4;
    const ChannelFormat format{16, 16, 0, 0, channel_unsigned};
    Handle array = 0, volume = 0, mipmap = 0, level = 0;
    EXPECT_OK("cudaMallocArray", &array, &format, u64{width}, u64{height}, 0U);
    std::vector<unsigned char> from = make_pattern(row_bytes * height, 6), to(from.size());
    EXPECT_OK("cudaMemcpy2DToArray", array, u64{0}, u64{0}, static_cast<const void*>(from.data()), u64{row_bytes},
              u64{row_bytes}, u64{height}, int{host_to_device});
    EXPECT_OK("cudaMemcpy2DFromArray", static_cast<void*>(to.data()), u64{row_bytes}, array, u64{0}, u64{0},
              u64{row_bytes}, u64{height}, int{device_to_host});
    CHECK(to == from);
    EXPECT_OK("cudaMalloc3DArray", &volume, &format, Extent{width, height, 2}, 0U);
    const auto as_pointer = [](Handle handle) { return reinterpret_cast<void*>(handle); };
    Copy3d copy{as_pointer(array), {1, 1, 0},       {}, as_pointer(volume), {2, 2, 1}, {},
                {width - 2, 3, 1}, device_to_device};
    EXPECT_OK("cudaMemcpy3D", static_cast<const Copy3d*>(&copy));
    copy = {as_pointer(volume), {2, 2, 1},     {}, nullptr, {}, {to.data(), row_bytes, row_bytes, height},
            {width - 2, 3, 1},  device_to_host};
    EXPECT_OK("cudaMemcpy3D_ptds", static_cast<const Copy3d*>(&copy));
    CHECK(std::equal(to.begin(), to.begin() + (width - 2) * 4, from.begin() + row_bytes + 4));
    EXPECT_OK("cudaMemcpyToArray", array, u64{4}, u64{1}, static_cast<const void*>(from.data()), u64{row_bytes},
              int{host_to_device});
    EXPECT_OK("cudaMemcpyFromArray_ptds", static_cast<void*>(to.data()), array, u64{4}, u64{1}, u64{row_bytes},
              int{device_to_host});
    CHECK(std::equal(from.begin(), from.begin() + row_bytes, to.begin()));
    ChannelFormat queried{};
    Extent extent{};
    unsigned flags = 9;
    EXPECT_OK("cudaArrayGetInfo", &queried, &extent, &flags, volume);
    CHECK(queried.x == 16 && queried.y == 16 && queried.z == 0 && queried.kind == channel_unsigned &&
          extent.depth == 2 && flags == 0);
    EXPECT_OK("cudaMallocMipmappedArray", &mipmap, &format, Extent{width, height, 0}, 3U, 0U);
    EXPECT_OK("cudaGetMipmappedArrayLevel", &level, mipmap, 1U);
    EXPECT_OK("cudaArrayGetInfo", &queried, &extent, &flags, level);
    CHECK(extent.width == width / 2 && extent.height == height / 2);
    const ChannelFormat uneven{8, 16, 0, 0, channel_unsigned};
    EXPECT_ERROR(invalid_channel_descriptor, "cudaMallocArray", &level, &uneven, u64{width}, u64{height}, 0U);
    EXPECT_OK("cudaFreeMipmappedArray", mipmap);
    EXPECT_OK("cudaFreeArray", array);
    EXPECT_OK("cudaFreeArray", volume);
    EXPECT_OK("cudaFreeArray", Handle{0});
}

void test_pools_of_the_host_and_memory_of_graphs() {
    u64 used_bytes = 9;
    EXPECT_OK("cudaDeviceGetGraphMemAttribute", 0, 0, static_cast<void*>(&used_bytes));
    CHECK(used_bytes == 0);
    EXPECT_OK("cudaDeviceGraphMemTrim", 0);
    EXPECT_OK("cudaProfilerStart");
    EXPECT_OK("cudaProfilerStop");
#if GDRKIT_CUDART_MAJOR == 13
    const cuda::Location host{cuda::location_host, 0};
    Handle pool = 0, current_pool = 0;
    EXPECT_OK("cudaMemGetDefaultMemPool", &pool, &host, int{cuda::allocation_pinned});
    EXPECT_OK("cudaMemGetMemPool", &current_pool, &host, int{cuda::allocation_pinned});
    CHECK(pool != 0 && pool == current_pool);
    EXPECT_OK("cudaMemSetMemPool", &host, int{cuda::allocation_pinned}, pool);
#endif
}

void test_managed_memory_is_prefetched() {
    void* memory = nullptr;
    const cuda::Location device{cuda::location_device, 1};
    EXPECT_OK("cudaMallocManaged", &memory, length_bytes, 1U);
    const void* const constant_memory = memory;
#if GDRKIT_CUDART_MAJOR == 12
    EXPECT_OK("cudaMemPrefetchAsync", constant_memory, length_bytes, 0, Handle{0});
    EXPECT_OK("cudaMemAdvise", constant_memory, length_bytes, int{cuda::advise_set_accessed_by}, 0);
    EXPECT_OK("cudaMemPrefetchAsync_v2", constant_memory, length_bytes, device, 0U, Handle{0});
    EXPECT_OK("cudaMemAdvise_v2", constant_memory, length_bytes, int{cuda::advise_set_preferred_location}, device);
#else
    EXPECT_OK("cudaMemPrefetchAsync", constant_memory, length_bytes, device, 0U, Handle{0});
    EXPECT_OK("cudaMemAdvise", constant_memory, length_bytes, int{cuda::advise_set_preferred_location}, device);
#endif
    for (const int attribute : {cuda::range_preferred_location, cuda::range_last_prefetch_location}) {
        int location = -9;
        EXPECT_OK("cudaMemRangeGetAttribute", static_cast<void*>(&location), u64{4}, attribute, constant_memory,
                  length_bytes);
        CHECK(location == 1);
    }
    EXPECT_OK("cudaStreamAttachMemAsync", Handle{0}, memory, u64{0}, 2U);
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
