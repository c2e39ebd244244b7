// Tests of the software twin of libcuda: the capture of streams into graphs, and the errors of a program that breaks
// the rules of a capture.
#include <thread>

#include "cuda/graph_abi.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr u64 length_bytes = 1000;
const Handle no_stream = 0;

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

// End a capture that was invalidated.
void end_invalidated_capture(Handle stream, int expected = stream_capture_invalidated) {
    Handle graph = 1;
    EXPECT_RESULT(expected, "cuStreamEndCapture", stream, &graph);
    CHECK(graph == 0);
    int status = -1;
    EXPECT_SUCCESS("cuStreamIsCapturing", stream, &status);
    CHECK(status == capture_none);
}

void fill(u64 memory, unsigned char value, Handle stream) {
    EXPECT_SUCCESS("cuMemsetD8Async", memory, value, length_bytes, stream);
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

// Work of a captured stream runs only when its graph is launched, and reads its source memory only then.
void test_captured_work_runs_at_launch() {
    const Handle stream = create_stream();
    const u64 first = allocate(length_bytes), second = allocate(length_bytes);
    std::vector<unsigned char> to(length_bytes), from(length_bytes, 1);
    static bool is_called = false;
    begin_capture(stream);
    EXPECT_SUCCESS("cuMemcpyHtoDAsync_v2", first, static_cast<const void*>(from.data()), length_bytes, stream);
    EXPECT_SUCCESS("cuMemcpyDtoDAsync_v2", second, first, length_bytes, stream);
    EXPECT_SUCCESS("cuMemcpyDtoHAsync_v2", static_cast<void*>(to.data()), second, length_bytes, stream);
    EXPECT_SUCCESS(
        "cuLaunchHostFunc", stream, +[](void* called) { *static_cast<bool*>(called) = true; },
        static_cast<void*>(&is_called));
    const Handle graph = end_capture(stream);
    CHECK(count_nodes(graph) == 4 && to[0] == 0 && !is_called);
    from.assign(length_bytes, 9);
    launch_and_destroy(graph, stream);
    CHECK(to == from && is_called);
    EXPECT_SUCCESS("cuMemFree_v2", first);
    EXPECT_SUCCESS("cuMemFree_v2", second);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A stream that waits for an event of a captured stream joins the capture.
void test_event_lets_a_stream_join() {
    const Handle stream = create_stream(), side_stream = create_stream(), fork_event = create_event(),
                 join_event = create_event();
    const u64 memory = allocate(length_bytes), result = allocate(length_bytes);
    begin_capture(stream);
    fill(memory, 1, stream);
    EXPECT_SUCCESS("cuEventRecord", fork_event, stream);
    EXPECT_SUCCESS("cuStreamWaitEvent", side_stream, fork_event, 0U);
    int status = -1;
    u64 capture_id = 0, side_capture_id = 0, nodes_count = 0;
    Handle graph = 0;
    const Handle* nodes = nullptr;
    EXPECT_SUCCESS("cuStreamGetCaptureInfo_v2", stream, &status, &capture_id, &graph, &nodes, &nodes_count);
    CHECK(status == capture_active && nodes_count == 1 && nodes[0] != 0 && graph != 0);
    EXPECT_SUCCESS("cuStreamGetCaptureInfo", side_stream, &status, &side_capture_id);
    CHECK(status == capture_active && capture_id == side_capture_id && capture_id != 0);
    fill(memory, 2, side_stream);
    EXPECT_SUCCESS("cuEventRecord", join_event, side_stream);
    EXPECT_SUCCESS("cuStreamWaitEvent", stream, join_event, 0U);
    EXPECT_SUCCESS("cuMemcpyDtoDAsync_v2", result, memory, length_bytes, stream);
    CHECK(end_capture(stream) == graph);
    EXPECT_SUCCESS("cuStreamIsCapturing", side_stream, &status);
    CHECK(status == capture_none);
    launch_and_destroy(graph, stream);
    CHECK(read_device(result, length_bytes)[length_bytes - 1] == 2);
    // The event stands for work of a capture that has ended.
    EXPECT_RESULT(invalid_value, "cuEventQuery", join_event);
    EXPECT_RESULT(invalid_value, "cuEventSynchronize", join_event);
    EXPECT_SUCCESS("cuEventRecord", join_event, stream);
    EXPECT_SUCCESS("cuEventSynchronize", join_event);
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
    EXPECT_SUCCESS("cuMemFree_v2", result);
}

void test_captured_allocations_become_nodes() {
    const Handle stream = create_stream();
    const u64 result = allocate(length_bytes);
    u64 pointer = 0;
    begin_capture(stream);
    EXPECT_SUCCESS("cuMemAllocAsync", &pointer, length_bytes, stream);
    fill(pointer, 4, stream);
    EXPECT_SUCCESS("cuMemcpyDtoDAsync_v2", result, pointer, length_bytes, stream);
    EXPECT_SUCCESS("cuMemFreeAsync", pointer, stream);
    const Handle graph = end_capture(stream);
    CHECK(count_nodes(graph) == 4);
    launch_and_destroy(graph, stream);
    CHECK(read_device(result, length_bytes)[length_bytes - 1] == 4);
    EXPECT_SUCCESS("cuMemFree_v2", result);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A graph that is launched into a captured stream becomes a child graph, and a capture can extend a graph.
void test_graphs_are_nested_and_extended() {
    const Handle stream = create_stream();
    const u64 memory = allocate(length_bytes);
    Handle executable = 0, node = 0, graph = 0;
    begin_capture(stream);
    fill(memory, 5, stream);
    const Handle inner_graph = end_capture(stream);
    EXPECT_SUCCESS("cuGraphInstantiateWithFlags", &executable, inner_graph, u64{0});
    EXPECT_SUCCESS("cuGraphCreate", &graph, 0U);
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &node, graph, static_cast<const Handle*>(nullptr), u64{0});
    EXPECT_SUCCESS("cuStreamBeginCaptureToGraph", stream, graph, static_cast<const Handle*>(&node),
                   static_cast<const EdgeData*>(nullptr), u64{1}, int{capture_mode_relaxed});
    EXPECT_SUCCESS("cuGraphLaunch", executable, stream);
    CHECK(end_capture(stream) == graph && count_nodes(graph) == 2);
    launch_and_destroy(graph, stream);
    CHECK(read_device(memory, length_bytes)[length_bytes - 1] == 5);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", inner_graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_calls_that_a_capture_forbids() {
    const Handle stream = create_stream(), other_stream = create_stream(), event = create_event();
    u64 pointer = 0;
    const auto expect_invalidated = [&](int expected, auto&& call) {
        begin_capture(stream);
        CHECK(call() == expected);
        int status = -1;
        EXPECT_SUCCESS("cuStreamIsCapturing", stream, &status);
        CHECK(status == capture_invalidated);
        EXPECT_RESULT(
            stream_capture_invalidated, "cuLaunchHostFunc", stream, +[](void*) {}, static_cast<void*>(nullptr));
        end_invalidated_capture(stream);
    };
    expect_invalidated(stream_capture_unsupported, [&] { return call_driver("cuStreamSynchronize", stream); });
    expect_invalidated(stream_capture_unsupported, [&] { return call_driver("cuStreamSynchronize", other_stream); });
    expect_invalidated(stream_capture_unsupported, [&] { return call_driver("cuStreamQuery", stream); });
    expect_invalidated(stream_capture_unsupported, [&] { return call_driver("cuCtxSynchronize"); });
    expect_invalidated(stream_capture_unsupported, [&] { return call_driver("cuMemAlloc_v2", &pointer, u64{100}); });
    expect_invalidated(stream_capture_unsupported, [&] { return call_driver("cuMemFree_v2", u64{0}); });
    // The event was recorded outside of the capture.
    EXPECT_SUCCESS("cuEventRecord", event, other_stream);
    expect_invalidated(stream_capture_isolation, [&] { return call_driver("cuStreamWaitEvent", stream, event, 0U); });
    expect_invalidated(captured_event, [&] {
        EXPECT_SUCCESS("cuEventRecord", event, stream);
        return call_driver("cuEventSynchronize", event);
    });
    // A stream of one capture cannot join another capture.
    begin_capture(other_stream, capture_mode_relaxed);
    EXPECT_SUCCESS("cuEventRecord", event, other_stream);
    expect_invalidated(stream_capture_merge, [&] { return call_driver("cuStreamWaitEvent", stream, event, 0U); });
    end_invalidated_capture(other_stream);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    for (const Handle stream_to_destroy : {stream, other_stream}) {
        EXPECT_SUCCESS("cuStreamDestroy_v2", stream_to_destroy);
    }
}

// Wrong arguments do not invalidate a capture, and a wait for an event that was never recorded does nothing.
void test_calls_that_leave_a_capture_valid() {
    const Handle stream = create_stream(), event = create_event();
    const u64 memory = allocate(length_bytes), no_memory = 0x1000;
    void (*const no_callback)(Handle, int, void*) = nullptr;
    void (*const callback)(Handle, int, void*) = [](Handle, int, void*) {};
    begin_capture(stream);
    EXPECT_RESULT(invalid_value, "cuStreamAddCallback", stream, no_callback, static_cast<void*>(nullptr), 0U);
    EXPECT_RESULT(invalid_value, "cuStreamAddCallback", stream, callback, static_cast<void*>(nullptr), 1U);
    EXPECT_RESULT(invalid_value, "cuMemcpyDtoDAsync_v2", memory, no_memory, length_bytes, stream);
    EXPECT_SUCCESS("cuStreamWaitEvent", stream, event, 0U);
    const Handle graph = end_capture(stream);
    CHECK(count_nodes(graph) == 0);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// The default stream would wait for a blocking stream, so a program cannot use it while a blocking stream is captured.
void test_default_stream_is_unusable_meanwhile() {
    const Handle stream = create_stream(0), non_blocking = create_stream();
    const u64 memory = allocate(length_bytes);
    int status = -1;
    EXPECT_RESULT(stream_capture_unsupported, "cuStreamBeginCapture_v2", no_stream, int{capture_mode_global});
    EXPECT_RESULT(invalid_value, "cuStreamBeginCapture_v2", stream, 3);
    begin_capture(stream);
    EXPECT_RESULT(illegal_state, "cuStreamBeginCapture_v2", stream, int{capture_mode_global});
    EXPECT_RESULT(stream_capture_implicit, "cuStreamIsCapturing", no_stream, &status);
    EXPECT_SUCCESS("cuStreamIsCapturing", stream, &status);
    CHECK(status == capture_active);
    EXPECT_RESULT(stream_capture_implicit, "cuMemsetD8_v2", memory, static_cast<unsigned char>(1), length_bytes);
    end_invalidated_capture(stream);
    begin_capture(stream);
    EXPECT_RESULT(stream_capture_implicit, "cuMemcpyDtoD_v2", memory, memory, length_bytes);
    end_invalidated_capture(stream);
    begin_capture(non_blocking, capture_mode_relaxed);
    fill(memory, 1, no_stream);
    fill(memory, 2, non_blocking);
    EXPECT_SUCCESS("cuGraphDestroy", end_capture(non_blocking));
    EXPECT_RESULT(illegal_state, "cuStreamEndCapture", stream, &status);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    for (const Handle stream_to_destroy : {stream, non_blocking}) {
        EXPECT_SUCCESS("cuStreamDestroy_v2", stream_to_destroy);
    }
}

// The mode of the capture and the mode of a thread together decide whether the thread may allocate during the capture.
void test_modes_decide_about_allocations() {
    const Handle stream = create_stream(), context = [] {
        Handle current = 0;
        EXPECT_SUCCESS("cuCtxGetCurrent", &current);
        return current;
    }();
    const auto allocate_in_thread = [=](int mode) {
        int result = -1;
        std::thread([&] {
            u64 pointer = 0;
            EXPECT_SUCCESS("cuCtxSetCurrent", context);
            EXPECT_SUCCESS("cuThreadExchangeStreamCaptureMode", &mode);
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
    init_device();
    test_captured_work_runs_at_launch();
    test_event_lets_a_stream_join();
    test_captured_allocations_become_nodes();
    test_graphs_are_nested_and_extended();
    test_calls_that_a_capture_forbids();
    test_calls_that_leave_a_capture_valid();
    test_default_stream_is_unusable_meanwhile();
    test_modes_decide_about_allocations();
}
