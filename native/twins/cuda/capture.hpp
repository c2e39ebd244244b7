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
    bool is_graph_new = false;      // the capture created the graph, which the program owns if the capture succeeds
    int mode = capture_mode_global; // CUstreamCaptureMode
    std::thread::id thread_id;      // the thread that began the capture
    std::weak_ptr<Stream> origin;   // the stream in which the capture began and must end
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
// captured node depends on `dependencies`, which are nodes of `graph`. end_capture_locked ends the capture and stores
// the handle of the graph, or 0 if the capture failed. The caller of both functions holds graph_mutex().
Result begin_capture_locked(const StreamRef& stream, int mode, GraphRef graph, std::vector<NodeRef> dependencies);
Result end_capture_locked(const StreamRef& stream, Handle* graph);

// Return the capture mode of this thread (CUstreamCaptureMode): it determines which captures the calls of this thread
// may invalidate.
int& thread_capture_mode();

// Append to `target` each of `nodes` that `target` does not contain yet.
void add_missing_nodes(const std::vector<NodeRef>& nodes, std::vector<NodeRef>* target);

// Return whether the stream belongs to a capture, even if the capture was invalidated.
bool is_captured(const StreamRef& stream);

// Refuse a call for a stream that is captured: fail with stream_capture_unsupported, and invalidate the capture.
Result refuse_captured_stream(const StreamRef& stream);

// Add a node for work that is queued in a captured stream. Fail if the capture was invalidated. Wrong parameters do not
// invalidate the capture.
Result capture_node(const StreamRef& stream, NodeParameters parameters);
// Do the same as capture_node, for a caller that holds graph_mutex().
Result capture_node_locked(const StreamRef& stream, NodeParameters parameters);

// Add a node for cuMemAllocAsync in a captured stream: reserve the address of the allocation and store it in `pointer`.
Result capture_allocation(const StreamRef& stream, Device device, std::uint64_t length_bytes, DevicePointer* pointer);

// Return the new state of an event that is recorded in a captured stream; null if the stream is not captured. The graph
// gets no node for the event.
std::shared_ptr<CapturedEvent> capture_event_record(const StreamRef& stream);

// Make a stream wait for an event. The stream must be captured, or the event must have been recorded in a captured
// stream. A stream that is not captured joins the capture of the event.
Result capture_event_wait(const ContextRef& context, const StreamRef& stream,
                          const std::shared_ptr<CapturedEvent>& event);

// Refuse a call, such as cuEventQuery, for an event that was last recorded in a captured stream. Fail with
// captured_event and invalidate the capture, or fail with invalid_value if the capture has ended.
Result refuse_captured_event(const CapturedEvent& event);

// Check a call that uses the legacy stream of the context. Fail with stream_capture_implicit if a blocking stream of
// the context is captured, because the legacy stream would wait for that stream. Also invalidate the capture of that
// stream, unless `keeps_captures_valid`.
Result refuse_legacy_stream_during_capture(const ContextRef& context, bool keeps_captures_valid = false);

// Check a call that waits for all work of the context. Such a call cannot be captured, so if a stream of the context is
// captured, fail with stream_capture_unsupported and invalidate the capture.
Result refuse_synchronize_during_capture(const ContextRef& context);

// Check a potentially unsafe call of this thread, such as an allocation. Invalidate every capture whose mode, together
// with the mode of this thread (cuThreadExchangeStreamCaptureMode), forbids the call. Fail with
// stream_capture_unsupported if there is such a capture.
Result check_captures_permit_call();

// Invalidate the capture of a stream whose handle is destroyed, and remove the stream from the capture. If the capture
// began in this stream, end the capture.
void abandon_capture(const StreamRef& stream);

} // namespace gdrkit::twin::cuda
