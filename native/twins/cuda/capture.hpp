// The capture of streams: work that is queued in a captured stream becomes nodes of a graph.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "cuda/graph.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {

// A capture, from cuStreamBeginCapture to cuStreamEndCapture.
struct Capture {
    std::uint64_t id = 0;
    GraphRef graph;
    bool is_graph_new = false; // the capture created the graph; if the capture succeeds, the program owns the graph
    int mode = capture_mode_global;
    std::thread::id thread_id;
    std::weak_ptr<Stream> origin;
    std::vector<std::weak_ptr<Stream>> streams; // the origin, and the streams that have joined
    bool is_invalidated = false;
};
using CaptureRef = std::shared_ptr<Capture>;

// The state of an event that was last recorded in a captured stream. A stream that waits for the event adds its next
// node after these nodes.
struct CapturedEvent {
    std::weak_ptr<Capture> capture;
    std::vector<NodeRef> nodes;
};

// Begin a capture in a stream. The capture adds nodes to `graph`, or to a new graph if `graph` is null. The first
// captured node depends on `dependencies`, which are nodes of `graph`. end_capture ends the capture and stores the
// handle of the graph, or 0 if the capture failed. Both functions require graph_mutex().
Result begin_capture(const StreamRef& stream, int mode, GraphRef graph, std::vector<NodeRef> dependencies);
Result end_capture(const StreamRef& stream, Handle* graph);

// Return the capture mode of this thread (CUstreamCaptureMode): it determines which captures the calls of this thread
// may invalidate.
int& thread_capture_mode();

// Add the nodes that are not in `target` yet.
void add_missing_nodes(const std::vector<NodeRef>& nodes, std::vector<NodeRef>* target);

// Return whether work of the stream is captured now, also if the capture was invalidated.
bool is_captured(const StreamRef& stream);

// Fail with stream_capture_unsupported, and invalidate the capture, if the stream is captured.
Result refuse_captured_stream(const StreamRef& stream);

// Add a node for work that is queued in a captured stream. Fail if the capture was invalidated. Wrong parameters do not
// invalidate the capture.
Result capture_node(const StreamRef& stream, NodeParameters parameters);
// Do the same as capture_node, for a caller that holds graph_mutex().
Result capture_node_locked(const StreamRef& stream, NodeParameters parameters);

// Capture cuMemAllocAsync: reserve the address of an allocation on the device.
Result capture_allocation(const StreamRef& stream, Device device, std::uint64_t length_bytes, DevicePointer* pointer);

// Record an event in a captured stream. The graph gets no node for it.
std::shared_ptr<CapturedEvent> capture_event_record(const StreamRef& stream);

// Make a stream wait for an event. The stream is captured, or the event was recorded in a captured stream. A stream
// that is not captured joins the capture of the event.
Result capture_event_wait(const ContextRef& context, const StreamRef& stream,
                          const std::shared_ptr<CapturedEvent>& event);

// Refuse a call, such as cuEventQuery, for an event that was last recorded in a captured stream. Fail with
// captured_event and invalidate the capture, or fail with invalid_value if the capture has ended.
Result refuse_captured_event(const CapturedEvent& event);

// Fail with stream_capture_implicit if a blocking stream of the context is captured, because the legacy stream would
// wait for that stream. Also invalidate the capture of that stream, unless `keeps_captures_valid`.
Result check_legacy_stream(const ContextRef& context, bool keeps_captures_valid = false);

// Fail with stream_capture_unsupported, and invalidate the capture, if a stream of the context is being captured,
// because a call that waits for all work of the context cannot be captured.
Result check_synchronisation(const ContextRef& context);

// Check a potentially unsafe call of this thread, such as an allocation. Invalidate every capture whose mode, together
// with the mode of this thread (cuThreadExchangeStreamCaptureMode), forbids the call. Fail with
// stream_capture_unsupported if there is such a capture.
Result check_unsafe_call();

// Invalidate the capture of a stream whose handle is destroyed.
void abandon_capture(const StreamRef& stream);

} // namespace gdrkit::twin::cuda
