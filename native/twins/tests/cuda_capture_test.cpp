// Tests of the software twin of libcuda: the capture of streams into graphs, and the errors of a program that breaks
// the rules of a capture.
#include <algorithm>
#include <thread>

#include "cuda/graph_abi.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr u64 buffer_bytes = 1000;
const Handle default_stream = 0;

Handle create_stream(unsigned flags = stream_non_blocking) {
    Handle stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, flags);
    return stream;
}

Handle create_event() {
    Handle event = 0;
    EXPECT_SUCCESS("cuEventCreate", &event, 0U);
    return event;
}

void begin_capture(Handle stream, int mode = capture_mode_global) {
    EXPECT_SUCCESS("cuStreamBeginCapture_v2", stream, mode);
}

Handle end_capture(Handle stream) {
    Handle graph = 0;
    EXPECT_SUCCESS("cuStreamEndCapture", stream, &graph);
    CHECK(graph != 0);
    return graph;
}

// End a capture that was invalidated, and check that cuStreamEndCapture returns `expected_result` and no graph.
void end_invalidated_capture(Handle stream, int expected_result = stream_capture_invalidated) {
    Handle graph = 1;
    EXPECT_RESULT(expected_result, "cuStreamEndCapture", stream, &graph);
    CHECK(graph == 0);
    int capture_status = -1;
    EXPECT_SUCCESS("cuStreamIsCapturing", stream, &capture_status);
    CHECK(capture_status == capture_none);
}

void fill(u64 memory, unsigned char value, Handle stream) {
    EXPECT_SUCCESS("cuMemsetD8Async", memory, value, buffer_bytes, stream);
}

u64 count_nodes(Handle graph) {
    u64 count = 0;
    EXPECT_SUCCESS("cuGraphGetNodes", graph, static_cast<Handle*>(nullptr), &count);
    return count;
}

void launch_and_destroy(Handle graph, Handle stream) {
    Handle executable = 0;
    EXPECT_SUCCESS("cuGraphInstantiateWithFlags", &executable, graph, u64{0});
    EXPECT_SUCCESS("cuGraphLaunch", executable, stream);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
}

// Work that a program queues in a captured stream runs only when the program launches the graph. A copy reads its
// source memory only then.
void test_captured_work_runs_at_launch() {
    const Handle stream = create_stream();
    const u64 first_memory = allocate(buffer_bytes), second_memory = allocate(buffer_bytes);
    std::vector<unsigned char> copied_bytes(buffer_bytes), source_bytes(buffer_bytes, 1);
    static bool was_called = false;
    begin_capture(stream);
    EXPECT_SUCCESS("cuMemcpyHtoDAsync_v2", first_memory, static_cast<const void*>(source_bytes.data()), buffer_bytes,
                   stream);
    EXPECT_SUCCESS("cuMemcpyDtoDAsync_v2", second_memory, first_memory, buffer_bytes, stream);
    EXPECT_SUCCESS("cuMemcpyDtoHAsync_v2", static_cast<void*>(copied_bytes.data()), second_memory, buffer_bytes,
                   stream);
    EXPECT_SUCCESS(
        "cuLaunchHostFunc", stream, +[](void* was_called_flag) { *static_cast<bool*>(was_called_flag) = true; },
        static_cast<void*>(&was_called));
    const Handle graph = end_capture(stream);
    CHECK(count_nodes(graph) == 4 && copied_bytes[0] == 0 && !was_called);
    source_bytes.assign(buffer_bytes, 9);
    launch_and_destroy(graph, stream);
    CHECK(copied_bytes == source_bytes && was_called);
    EXPECT_SUCCESS("cuMemFree_v2", first_memory);
    EXPECT_SUCCESS("cuMemFree_v2", second_memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A stream that waits for an event of a captured stream joins the capture.
void test_event_lets_a_stream_join() {
    const Handle stream = create_stream(), side_stream = create_stream(), fork_event = create_event(),
                 join_event = create_event();
    const u64 memory = allocate(buffer_bytes), result_memory = allocate(buffer_bytes);
    begin_capture(stream);
    fill(memory, 1, stream);
    EXPECT_SUCCESS("cuEventRecord", fork_event, stream);
    EXPECT_SUCCESS("cuStreamWaitEvent", side_stream, fork_event, 0U);
    int capture_status = -1;
    u64 capture_id = 0, side_capture_id = 0, node_count = 0;
    Handle graph = 0;
    const Handle* nodes = nullptr;
    EXPECT_SUCCESS("cuStreamGetCaptureInfo_v2", stream, &capture_status, &capture_id, &graph, &nodes, &node_count);
    CHECK(capture_status == capture_active && node_count == 1 && nodes[0] != 0 && graph != 0);
    EXPECT_SUCCESS("cuStreamGetCaptureInfo", side_stream, &capture_status, &side_capture_id);
    CHECK(capture_status == capture_active && capture_id == side_capture_id && capture_id != 0);
    fill(memory, 2, side_stream);
    EXPECT_SUCCESS("cuEventRecord", join_event, side_stream);
    EXPECT_SUCCESS("cuStreamWaitEvent", stream, join_event, 0U);
    EXPECT_SUCCESS("cuMemcpyDtoDAsync_v2", result_memory, memory, buffer_bytes, stream);
    CHECK(end_capture(stream) == graph);
    EXPECT_SUCCESS("cuStreamIsCapturing", side_stream, &capture_status);
    CHECK(capture_status == capture_none);
    launch_and_destroy(graph, stream);
    CHECK(read_device(result_memory, buffer_bytes)[buffer_bytes - 1] == 2);
    // The event was recorded in a capture, so a program can neither query it nor wait for it.
    EXPECT_RESULT(invalid_value, "cuEventQuery", join_event);
    EXPECT_RESULT(invalid_value, "cuEventSynchronize", join_event);
    // A new record, outside of a capture, makes the event usable again.
    EXPECT_SUCCESS("cuEventRecord", join_event, stream);
    EXPECT_SUCCESS("cuEventSynchronize", join_event);
    // A capture fails if it ends before the first stream waits for every stream that joined the capture.
    begin_capture(stream);
    EXPECT_SUCCESS("cuEventRecord", fork_event, stream);
    EXPECT_SUCCESS("cuStreamWaitEvent", side_stream, fork_event, 0U);
    fill(memory, 3, side_stream);
    end_invalidated_capture(stream, stream_capture_unjoined);
    for (const Handle event : {fork_event, join_event}) {
        EXPECT_SUCCESS("cuEventDestroy_v2", event);
    }
    for (const Handle stream_to_destroy : {stream, side_stream}) {
        EXPECT_SUCCESS("cuStreamDestroy_v2", stream_to_destroy);
    }
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuMemFree_v2", result_memory);
}

// cuStreamGetCaptureInfo_v3 returns the nodes on which the next captured node will depend, and the data of the edge
// from each of these nodes. A call that requests the edge data without the nodes fails. Like the driver of an H200, it
// fails only during a capture, and stores the state of the capture.
void test_capture_has_edge_data_for_each_node() {
    const Handle stream = create_stream();
    Handle graph = 0;
    std::vector<Handle> dependencies(1000);
    EXPECT_SUCCESS("cuGraphCreate", &graph, 0U);
    for (Handle& node : dependencies) {
        EXPECT_SUCCESS("cuGraphAddEmptyNode", &node, graph, static_cast<const Handle*>(nullptr), u64{0});
    }
    int capture_status = -1;
    u64 capture_id = 0, node_count = 7; // a call that stores no nodes must not change the 7
    Handle captured_graph = 0;
    const Handle* nodes = nullptr;
    const EdgeData* edge_data = nullptr;
    EXPECT_SUCCESS("cuStreamGetCaptureInfo_v3", stream, &capture_status, &capture_id, &captured_graph, &nodes,
                   &edge_data, &node_count);
    CHECK(capture_status == capture_none && nodes == nullptr && edge_data == nullptr && node_count == 7);
    EXPECT_SUCCESS("cuStreamGetCaptureInfo_v3", stream, &capture_status, &capture_id, &captured_graph,
                   static_cast<const Handle**>(nullptr), &edge_data, &node_count);
    EXPECT_SUCCESS("cuStreamBeginCaptureToGraph", stream, graph, static_cast<const Handle*>(dependencies.data()),
                   static_cast<const EdgeData*>(nullptr), u64{dependencies.size()}, int{capture_mode_relaxed});
    capture_status = -1;
    EXPECT_RESULT(invalid_value, "cuStreamGetCaptureInfo_v3", stream, &capture_status, &capture_id, &captured_graph,
                  static_cast<const Handle**>(nullptr), &edge_data, &node_count);
    CHECK(capture_status == capture_active && edge_data == nullptr && node_count == 7);
    EXPECT_SUCCESS("cuStreamGetCaptureInfo_v3", stream, &capture_status, &capture_id, &captured_graph, &nodes,
                   &edge_data, &node_count);
    CHECK(capture_status == capture_active && captured_graph == graph && node_count == dependencies.size());
    CHECK(std::equal(dependencies.begin(), dependencies.end(), nodes));
    CHECK(std::all_of(edge_data, edge_data + node_count,
                      [](const EdgeData& edge) { return edge.from_port == 0 && edge.to_port == 0 && edge.type == 0; }));
    CHECK(end_capture(stream) == graph);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// Only kernels, which the twin does not have, allow edges with other data than the default.
void test_other_edge_data_is_refused() {
    const Handle stream = create_stream();
    Handle graph = 0, node = 0;
    EXPECT_SUCCESS("cuGraphCreate", &graph, 0U);
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &node, graph, static_cast<const Handle*>(nullptr), u64{0});
    const auto check_calls_with_edge = [&](EdgeData edge, int expected_result) {
        const Handle* const dependency = &node;
        const EdgeData* const edge_data = &edge;
        Handle dependent_node = 0;
        NodeParameterUnion parameters{};
        parameters.type = node_empty;
        EXPECT_RESULT(expected_result, "cuGraphAddNode_v2", &dependent_node, graph, dependency, edge_data, u64{1},
                      &parameters);
        EXPECT_RESULT(expected_result, "cuStreamBeginCaptureToGraph", stream, graph, dependency, edge_data, u64{1},
                      int{capture_mode_relaxed});
        if (expected_result != success) {
            EXPECT_SUCCESS("cuStreamBeginCaptureToGraph", stream, graph, static_cast<const Handle*>(nullptr),
                           static_cast<const EdgeData*>(nullptr), u64{0}, int{capture_mode_relaxed});
        }
        EXPECT_RESULT(expected_result, "cuStreamUpdateCaptureDependencies_v2", stream, &node, edge_data, u64{1},
                      unsigned{capture_add_dependencies});
        CHECK(end_capture(stream) == graph);
    };
    // The members of EdgeData are from_port, to_port, type and reserved bytes.
    check_calls_with_edge({}, success);
    check_calls_with_edge({1, 0, 0, {}}, invalid_value);
    check_calls_with_edge({0, 1, 0, {}}, invalid_value);
    check_calls_with_edge({0, 0, 1, {}}, invalid_value);
    check_calls_with_edge({0, 0, 0, {1}}, invalid_value);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_captured_allocations_become_nodes() {
    const Handle stream = create_stream();
    const u64 result_memory = allocate(buffer_bytes);
    u64 captured_pointer = 0;
    begin_capture(stream);
    EXPECT_SUCCESS("cuMemAllocAsync", &captured_pointer, buffer_bytes, stream);
    fill(captured_pointer, 4, stream);
    EXPECT_SUCCESS("cuMemcpyDtoDAsync_v2", result_memory, captured_pointer, buffer_bytes, stream);
    EXPECT_SUCCESS("cuMemFreeAsync", captured_pointer, stream);
    const Handle graph = end_capture(stream);
    CHECK(count_nodes(graph) == 4);
    launch_and_destroy(graph, stream);
    CHECK(read_device(result_memory, buffer_bytes)[buffer_bytes - 1] == 4);
    EXPECT_SUCCESS("cuMemFree_v2", result_memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// The launch of a graph into a captured stream adds the graph to the capture as one node. A capture can also add its
// nodes to an existing graph (cuStreamBeginCaptureToGraph).
void test_graphs_are_nested_and_extended() {
    const Handle stream = create_stream();
    const u64 memory = allocate(buffer_bytes);
    Handle executable = 0, empty_node = 0, graph = 0;
    begin_capture(stream);
    fill(memory, 5, stream);
    const Handle inner_graph = end_capture(stream);
    EXPECT_SUCCESS("cuGraphInstantiateWithFlags", &executable, inner_graph, u64{0});
    EXPECT_SUCCESS("cuGraphCreate", &graph, 0U);
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &empty_node, graph, static_cast<const Handle*>(nullptr), u64{0});
    EXPECT_SUCCESS("cuStreamBeginCaptureToGraph", stream, graph, static_cast<const Handle*>(&empty_node),
                   static_cast<const EdgeData*>(nullptr), u64{1}, int{capture_mode_relaxed});
    EXPECT_SUCCESS("cuGraphLaunch", executable, stream);
    CHECK(end_capture(stream) == graph && count_nodes(graph) == 2);
    launch_and_destroy(graph, stream);
    CHECK(read_device(memory, buffer_bytes)[buffer_bytes - 1] == 5);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", inner_graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_calls_that_a_capture_forbids() {
    const Handle stream = create_stream(), other_stream = create_stream(), event = create_event();
    u64 pointer = 0;
    const auto expect_call_invalidates = [&](int expected_result, auto&& call) {
        begin_capture(stream);
        CHECK(call() == expected_result);
        int capture_status = -1;
        EXPECT_SUCCESS("cuStreamIsCapturing", stream, &capture_status);
        CHECK(capture_status == capture_invalidated);
        EXPECT_RESULT(
            stream_capture_invalidated, "cuLaunchHostFunc", stream, +[](void*) {}, static_cast<void*>(nullptr));
        end_invalidated_capture(stream);
    };
    expect_call_invalidates(stream_capture_unsupported, [&] { return call_driver("cuStreamSynchronize", stream); });
    expect_call_invalidates(stream_capture_unsupported,
                            [&] { return call_driver("cuStreamSynchronize", other_stream); });
    expect_call_invalidates(stream_capture_unsupported, [&] { return call_driver("cuStreamQuery", stream); });
    expect_call_invalidates(stream_capture_unsupported, [&] { return call_driver("cuCtxSynchronize"); });
    expect_call_invalidates(stream_capture_unsupported,
                            [&] { return call_driver("cuMemAlloc_v2", &pointer, u64{100}); });
    expect_call_invalidates(stream_capture_unsupported, [&] { return call_driver("cuMemFree_v2", u64{0}); });
    // A captured stream cannot wait for an event that was recorded outside of the capture.
    EXPECT_SUCCESS("cuEventRecord", event, other_stream);
    expect_call_invalidates(stream_capture_isolation,
                            [&] { return call_driver("cuStreamWaitEvent", stream, event, 0U); });
    expect_call_invalidates(captured_event, [&] {
        EXPECT_SUCCESS("cuEventRecord", event, stream);
        return call_driver("cuEventSynchronize", event);
    });
    // A stream of one capture cannot join another capture.
    begin_capture(other_stream, capture_mode_relaxed);
    EXPECT_SUCCESS("cuEventRecord", event, other_stream);
    expect_call_invalidates(stream_capture_merge, [&] { return call_driver("cuStreamWaitEvent", stream, event, 0U); });
    end_invalidated_capture(other_stream);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    for (const Handle stream_to_destroy : {stream, other_stream}) {
        EXPECT_SUCCESS("cuStreamDestroy_v2", stream_to_destroy);
    }
}

// Wrong arguments do not invalidate a capture, and a wait for an event that was never recorded does nothing.
void test_calls_that_leave_a_capture_valid() {
    const Handle stream = create_stream(), event = create_event();
    const u64 memory = allocate(buffer_bytes), unallocated_address = 0x1000;
    void (*const no_callback)(Handle, int, void*) = nullptr;
    void (*const callback)(Handle, int, void*) = [](Handle, int, void*) {};
    begin_capture(stream);
    EXPECT_RESULT(invalid_value, "cuStreamAddCallback", stream, no_callback, static_cast<void*>(nullptr), 0U);
    EXPECT_RESULT(invalid_value, "cuStreamAddCallback", stream, callback, static_cast<void*>(nullptr),
                  1U); // the flags must be 0
    EXPECT_RESULT(invalid_value, "cuMemcpyDtoDAsync_v2", memory, unallocated_address, buffer_bytes, stream);
    EXPECT_SUCCESS("cuStreamWaitEvent", stream, event, 0U);
    const Handle graph = end_capture(stream);
    CHECK(count_nodes(graph) == 0);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// The default stream would wait for a blocking stream, so a program cannot use the default stream while a blocking
// stream is captured.
void test_default_stream_is_unusable_meanwhile() {
    const Handle stream = create_stream(0), non_blocking_stream = create_stream(); // 0 means a blocking stream
    const u64 memory = allocate(buffer_bytes);
    int capture_status = -1;
    EXPECT_RESULT(stream_capture_unsupported, "cuStreamBeginCapture_v2", default_stream, int{capture_mode_global});
    EXPECT_RESULT(invalid_value, "cuStreamBeginCapture_v2", stream, 3); // 3 is not a mode
    begin_capture(stream);
    EXPECT_RESULT(illegal_state, "cuStreamBeginCapture_v2", stream, int{capture_mode_global});
    EXPECT_RESULT(stream_capture_implicit, "cuStreamIsCapturing", default_stream, &capture_status);
    EXPECT_SUCCESS("cuStreamIsCapturing", stream, &capture_status);
    CHECK(capture_status == capture_active);
    EXPECT_RESULT(stream_capture_implicit, "cuMemsetD8_v2", memory, static_cast<unsigned char>(1), buffer_bytes);
    end_invalidated_capture(stream);
    begin_capture(stream);
    EXPECT_RESULT(stream_capture_implicit, "cuMemcpyDtoD_v2", memory, memory, buffer_bytes);
    end_invalidated_capture(stream);
    begin_capture(non_blocking_stream, capture_mode_relaxed);
    fill(memory, 1, default_stream);
    fill(memory, 2, non_blocking_stream);
    EXPECT_SUCCESS("cuGraphDestroy", end_capture(non_blocking_stream));
    Handle graph = 0;
    EXPECT_RESULT(illegal_state, "cuStreamEndCapture", stream, &graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    for (const Handle stream_to_destroy : {stream, non_blocking_stream}) {
        EXPECT_SUCCESS("cuStreamDestroy_v2", stream_to_destroy);
    }
}

// The mode of the capture and the mode of a thread together decide whether the thread may allocate during the capture.
void test_modes_decide_about_allocations() {
    const Handle stream = create_stream(), context = [] {
        Handle current_context = 0;
        EXPECT_SUCCESS("cuCtxGetCurrent", &current_context);
        return current_context;
    }();
    const auto allocate_in_thread = [=](int thread_mode) {
        int result = -1;
        std::thread([&] {
            u64 pointer = 0;
            EXPECT_SUCCESS("cuCtxSetCurrent", context);
            EXPECT_SUCCESS("cuThreadExchangeStreamCaptureMode", &thread_mode);
            result = call_driver("cuMemAlloc_v2", &pointer, u64{100});
            if (result == success) {
                EXPECT_SUCCESS("cuMemFree_v2", pointer);
            }
        }).join();
        return result;
    };
    begin_capture(stream, capture_mode_global);
    CHECK(allocate_in_thread(capture_mode_relaxed) == success);
    CHECK(allocate_in_thread(capture_mode_thread_local) == success);
    CHECK(allocate_in_thread(capture_mode_global) == stream_capture_unsupported);
    end_invalidated_capture(stream);
    begin_capture(stream, capture_mode_thread_local);
    CHECK(allocate_in_thread(capture_mode_global) == success);
    std::thread([=] {
        Handle graph = 0;
        EXPECT_SUCCESS("cuCtxSetCurrent", context);
        EXPECT_RESULT(stream_capture_wrong_thread, "cuStreamEndCapture", stream, &graph);
    }).join();
    EXPECT_SUCCESS("cuGraphDestroy", end_capture(stream));
    begin_capture(stream, capture_mode_relaxed);
    CHECK(allocate_in_thread(capture_mode_global) == success);
    EXPECT_SUCCESS("cuMemFree_v2", allocate(100));
    EXPECT_SUCCESS("cuGraphDestroy", end_capture(stream));
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

} // namespace

int main() {
    use_primary_context();
    test_captured_work_runs_at_launch();
    test_event_lets_a_stream_join();
    test_capture_has_edge_data_for_each_node();
    test_other_edge_data_is_refused();
    test_captured_allocations_become_nodes();
    test_graphs_are_nested_and_extended();
    test_calls_that_a_capture_forbids();
    test_calls_that_leave_a_capture_valid();
    test_default_stream_is_unusable_meanwhile();
    test_modes_decide_about_allocations();
}
