// The rules of stream captures (cuStreamBeginCapture): which streams, events and calls belong to a capture, and what
// invalidates a capture.
#include "cuda/capture.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace gdrkit::twin::cuda {
namespace {

// The capture mode of this thread, which cuThreadExchangeStreamCaptureMode sets.
thread_local int mode_of_this_thread = capture_mode_global;

// The captures that have not ended; guarded by graph_mutex().
std::vector<CaptureRef>& captures() {
    static auto* const instance = new std::vector<CaptureRef>;
    return *instance;
}

// Return the streams that still belong to a capture.
std::vector<StreamRef> list_streams(const CaptureRef& capture) {
    std::vector<StreamRef> streams;
    for (const auto& weak_stream : capture->streams) {
        if (StreamRef stream = weak_stream.lock(); stream && stream->capture == capture) {
            streams.push_back(std::move(stream));
        }
    }
    return streams;
}

// Return whether a capture has a stream for which the predicate is true. Invalidate every such capture, unless
// `keeps_captures_valid`.
template <typename Predicate> bool invalidate_captures_if(Predicate&& predicate, bool keeps_captures_valid = false) {
    bool has_matching_capture = false;
    for (const CaptureRef& capture : captures()) {
        if (std::ranges::any_of(list_streams(capture), predicate)) {
            capture->is_invalidated |= !keeps_captures_valid;
            has_matching_capture = true;
        }
    }
    return has_matching_capture;
}

void join_capture(const CaptureRef& capture, const StreamRef& stream, std::vector<NodeRef> dependencies) {
    stream->capture = capture;
    stream->capture_dependencies = std::move(dependencies);
    capture->streams.push_back(stream);
}

void leave_capture(const StreamRef& stream) {
    stream->capture.reset();
    stream->capture_dependencies.clear();
}

void finish_capture(const CaptureRef& capture) {
    std::ranges::for_each(list_streams(capture), leave_capture);
    capture->graph->is_capturing = false;
    std::erase(captures(), capture);
}

// Return whether the origin stream waits for all captured work of the other streams.
bool is_joined(const CaptureRef& capture, const StreamRef& origin) {
    std::set<NodeRef> reached_nodes;
    std::vector<NodeRef> pending_nodes = origin->capture_dependencies;
    while (!pending_nodes.empty()) {
        const NodeRef node = pending_nodes.back();
        pending_nodes.pop_back();
        if (reached_nodes.insert(node).second) {
            pending_nodes.insert(pending_nodes.end(), node->dependencies.begin(), node->dependencies.end());
        }
    }
    return std::ranges::all_of(list_streams(capture), [&](const StreamRef& stream) {
        return std::ranges::all_of(stream->capture_dependencies,
                                   [&](const NodeRef& node) { return reached_nodes.contains(node); });
    });
}

} // namespace

int& thread_capture_mode() {
    return mode_of_this_thread;
}

Result begin_capture_locked(const StreamRef& stream, int mode, GraphRef graph, std::vector<NodeRef> dependencies) {
    static std::uint64_t last_capture_id = 0;
    if (stream->capture) {
        return illegal_state;
    }
    auto capture = std::make_shared<Capture>();
    capture->id = ++last_capture_id;
    capture->is_graph_new = graph == nullptr;
    capture->graph = graph ? std::move(graph) : make_graph();
    capture->graph->is_capturing = true;
    capture->mode = mode;
    capture->thread_id = std::this_thread::get_id();
    capture->origin = stream;
    captures().push_back(capture);
    join_capture(capture, stream, std::move(dependencies));
    return success;
}

Result end_capture_locked(const StreamRef& stream, Handle* handle) {
    const CaptureRef capture = stream->capture;
    if (!capture) {
        return illegal_state;
    }
    if (capture->origin.lock() != stream) {
        capture->is_invalidated = true;
        return stream_capture_unmatched;
    }
    if (capture->mode != capture_mode_relaxed && capture->thread_id != std::this_thread::get_id()) {
        return stream_capture_wrong_thread;
    }
    const Result result = capture->is_invalidated       ? stream_capture_invalidated
                          : !is_joined(capture, stream) ? stream_capture_unjoined
                                                        : success;
    finish_capture(capture);
    if (result == success && capture->is_graph_new) {
        add_owned_graph(capture->graph);
    }
    *handle = result == success ? capture->graph->handle : 0;
    return result;
}

bool is_captured(const StreamRef& stream) {
    std::lock_guard lock(graph_mutex());
    return stream->capture != nullptr;
}

Result refuse_captured_stream(const StreamRef& stream) {
    std::lock_guard lock(graph_mutex());
    if (!stream->capture) {
        return success;
    }
    stream->capture->is_invalidated = true;
    return stream_capture_unsupported;
}

Result capture_node_locked(const StreamRef& stream, NodeParameters parameters) {
    const CaptureRef capture = stream->capture;
    if (!capture || capture->is_invalidated) {
        return stream_capture_invalidated;
    }
    if (const Result result = check_parameters(parameters); result != success) {
        return result;
    }
    stream->capture_dependencies = {add_node(capture->graph, std::move(parameters), stream->capture_dependencies)};
    return success;
}

Result capture_node(const StreamRef& stream, NodeParameters parameters) {
    std::lock_guard lock(graph_mutex());
    return capture_node_locked(stream, std::move(parameters));
}

Result capture_allocation(const StreamRef& stream, Device device, std::uint64_t length_bytes, DevicePointer* pointer) {
    AllocateParameters parameters{};
    parameters.pool.allocation_type = allocation_pinned;
    parameters.pool.location = {location_device, device};
    parameters.length_bytes = length_bytes;
    AllocateNode node;
    std::lock_guard lock(graph_mutex());
    Result result = make_allocation(&parameters, &node);
    if (result == success) {
        result = capture_node_locked(stream, std::move(node));
    }
    if (result == success) {
        *pointer = parameters.pointer;
    }
    return result;
}

std::shared_ptr<CapturedEvent> capture_event_record(const StreamRef& stream) {
    std::lock_guard lock(graph_mutex());
    return stream->capture ? std::make_shared<CapturedEvent>(stream->capture, stream->capture_dependencies) : nullptr;
}

void add_missing_nodes(const std::vector<NodeRef>& nodes, std::vector<NodeRef>* target) {
    for (const NodeRef& node : nodes) {
        if (std::ranges::find(*target, node) == target->end()) {
            target->push_back(node);
        }
    }
}

Result capture_event_wait(const ContextRef& context, const StreamRef& stream,
                          const std::shared_ptr<CapturedEvent>& event) {
    std::lock_guard lock(graph_mutex());
    const CaptureRef capture_of_event = event ? event->capture.lock() : nullptr;
    const CaptureRef& capture_of_stream = stream->capture;
    if (!capture_of_event) {
        // The event belongs to no active capture. If the stream is captured, the wait would make its capture depend on
        // work outside of the capture. If the stream is not captured, the capture of the event has ended, because the
        // caller ensures that the stream is captured or that the event was recorded in a captured stream.
        if (capture_of_stream) {
            capture_of_stream->is_invalidated = true;
        }
        return capture_of_stream ? stream_capture_isolation : Result::captured_event;
    }
    if (capture_of_event->is_invalidated || (capture_of_stream && capture_of_stream->is_invalidated)) {
        return stream_capture_invalidated;
    }
    if (stream == context->legacy_stream) {
        // The legacy stream cannot join a capture.
        capture_of_event->is_invalidated = true;
        return stream_capture_implicit;
    }
    if (!capture_of_stream) {
        join_capture(capture_of_event, stream, event->nodes);
        return success;
    }
    if (capture_of_stream != capture_of_event) {
        capture_of_stream->is_invalidated = capture_of_event->is_invalidated = true;
        return stream_capture_merge;
    }
    add_missing_nodes(event->nodes, &stream->capture_dependencies);
    return success;
}

Result refuse_captured_event(const CapturedEvent& event) {
    std::lock_guard lock(graph_mutex());
    const CaptureRef capture = event.capture.lock();
    if (!capture) {
        return invalid_value;
    }
    capture->is_invalidated = true;
    return Result::captured_event;
}

Result refuse_legacy_stream_during_capture(const ContextRef& context, bool keeps_captures_valid) {
    std::lock_guard lock(graph_mutex());
    const bool has_captured_blocking_stream = invalidate_captures_if(
        [&](const StreamRef& stream) { return stream->is_blocking() && stream->context.lock() == context; },
        keeps_captures_valid);
    return has_captured_blocking_stream ? stream_capture_implicit : success;
}

Result refuse_synchronize_during_capture(const ContextRef& context) {
    std::lock_guard lock(graph_mutex());
    const bool has_captured_stream =
        invalidate_captures_if([&](const StreamRef& stream) { return stream->context.lock() == context; });
    return has_captured_stream ? stream_capture_unsupported : success;
}

Result check_captures_permit_call() {
    if (mode_of_this_thread == capture_mode_relaxed) {
        return success;
    }
    std::lock_guard lock(graph_mutex());
    Result result = success;
    for (const CaptureRef& capture : captures()) {
        // A capture that this thread began forbids the call, unless the capture's mode is relaxed. A capture of another
        // thread forbids it only if the capture's mode and the mode of this thread are both global.
        const bool began_in_this_thread = capture->thread_id == std::this_thread::get_id();
        if (began_in_this_thread ? capture->mode != capture_mode_relaxed
                                 : capture->mode == capture_mode_global && mode_of_this_thread == capture_mode_global) {
            capture->is_invalidated = true;
            result = stream_capture_unsupported;
        }
    }
    return result;
}

void abandon_capture(const StreamRef& stream) {
    std::lock_guard lock(graph_mutex());
    const CaptureRef capture = stream->capture;
    if (!capture) {
        return;
    }
    capture->is_invalidated = true;
    if (capture->origin.lock() == stream) {
        // No call can end this capture any more.
        finish_capture(capture);
    }
    leave_capture(stream);
}

} // namespace gdrkit::twin::cuda
