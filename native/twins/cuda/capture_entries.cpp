// Implements cuStreamBeginCapture, cuStreamEndCapture, and the calls that query or change a capture.
#include <utility>

#include "cuda/capture.hpp"

namespace gdrkit::twin::cuda {
namespace {

// Find the stream of a handle, even if the stream is captured, and run `body` with the stream while graph_mutex() is
// held.
template <typename Body> Result run_capture_entry(std::string_view symbol, Handle handle, Body&& body) {
    return run_entry_in_context(symbol, [&](const ContextRef& context) {
        StreamRef stream;
        const Result find_result = find_stream(handle, context, &stream, CapturePolicy::manage);
        std::lock_guard lock(graph_mutex());
        return find_result == success ? body(context, stream) : find_result;
    });
}

// The default handle, 0, also means the legacy stream.
bool is_legacy_stream(Handle handle) {
    return handle == default_stream_handle || handle == legacy_stream_handle;
}

Result begin_capture_to_new_graph(std::string_view symbol, Handle handle, int mode) {
    return run_entry_in_context(symbol, [&](const ContextRef& context) {
        StreamRef stream;
        if (is_legacy_stream(handle)) {
            return stream_capture_unsupported;
        }
        const Result result = find_stream(handle, context, &stream, CapturePolicy::allow);
        if (result != success || mode < capture_mode_global || mode > capture_mode_relaxed) {
            return result != success ? result : invalid_value;
        }
        std::lock_guard lock(graph_mutex());
        return begin_capture_locked(stream, mode, nullptr, {});
    });
}

// The pointers to which a query of a capture stores its results. A null pointer means that the result is not requested.
struct CaptureOutputs {
    int* status;
    std::uint64_t* id;
    Handle* graph;
    const Handle** dependencies;
    const EdgeData** edges;
    std::size_t* dependency_count;
};

Result store_capture_outputs(const StreamRef& stream, const CaptureOutputs& outputs) {
    if (outputs.status == nullptr) {
        return invalid_value;
    }
    const CaptureRef& capture = stream->capture;
    *outputs.status = !capture ? capture_none : capture->is_invalidated ? capture_invalidated : capture_active;
    if (outputs.id != nullptr) {
        *outputs.id = capture ? capture->id : 0;
    }
    if (*outputs.status != capture_active) {
        return success;
    }
    // A program that requests the edges must also request the dependencies. Like the driver of an H200, check this only
    // if a capture is active.
    if (outputs.edges != nullptr && outputs.dependencies == nullptr) {
        return invalid_value;
    }
    stream->capture_handles.clear();
    for (const NodeRef& node : stream->capture_dependencies) {
        stream->capture_handles.push_back(node->handle);
    }
    stream->capture_edges.assign(stream->capture_handles.size(), EdgeData{});
    if (outputs.graph != nullptr) {
        *outputs.graph = capture->graph->handle;
    }
    if (outputs.dependencies != nullptr) {
        *outputs.dependencies = stream->capture_handles.data();
    }
    if (outputs.edges != nullptr) {
        *outputs.edges = stream->capture_edges.data();
    }
    if (outputs.dependency_count != nullptr) {
        *outputs.dependency_count = stream->capture_handles.size();
    }
    return success;
}

Result query_capture(std::string_view symbol, Handle handle, const CaptureOutputs& outputs) {
    return run_capture_entry(symbol, handle, [&](const ContextRef&, const StreamRef& stream) {
        return store_capture_outputs(stream, outputs);
    });
}

Result update_dependencies(const StreamRef& stream, const Handle* node_handles, const EdgeData* edge_data,
                           std::size_t node_count, unsigned flags) {
    std::vector<NodeRef> nodes;
    if (!stream->capture) {
        return illegal_state;
    }
    if (stream->capture->is_invalidated) {
        return stream_capture_invalidated;
    }
    if (flags > capture_set_dependencies || !is_default_edge_data(edge_data, node_count) ||
        find_nodes(*stream->capture->graph, node_handles, node_count, &nodes) != success) {
        return invalid_value;
    }
    if (flags == capture_set_dependencies) {
        stream->capture_dependencies.clear();
    }
    add_missing_nodes(nodes, &stream->capture_dependencies);
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuStreamBeginCapture(Handle stream) {
    return begin_capture_to_new_graph("cuStreamBeginCapture", stream, capture_mode_global);
}

GDRKIT_CUDA_ENTRY Result cuStreamBeginCapture_v2(Handle stream, int mode) {
    return begin_capture_to_new_graph("cuStreamBeginCapture_v2", stream, mode);
}

GDRKIT_CUDA_ENTRY Result cuStreamBeginCaptureToGraph(Handle handle, Handle graph_handle, const Handle* dependencies,
                                                     const EdgeData* edge_data, std::size_t dependency_count,
                                                     int mode) {
    return run_capture_entry("cuStreamBeginCaptureToGraph", handle, [&](const ContextRef&, const StreamRef& stream) {
        std::vector<NodeRef> nodes;
        const GraphRef graph = find_graph(graph_handle);
        if (is_legacy_stream(handle)) {
            return stream_capture_unsupported;
        }
        if (!graph || graph->is_capturing || mode < capture_mode_global || mode > capture_mode_relaxed ||
            !is_default_edge_data(edge_data, dependency_count) ||
            find_nodes(*graph, dependencies, dependency_count, &nodes) != success) {
            return invalid_value;
        }
        return begin_capture_locked(stream, mode, graph, std::move(nodes));
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamEndCapture(Handle handle, Handle* graph) {
    return run_capture_entry("cuStreamEndCapture", handle, [&](const ContextRef&, const StreamRef& stream) {
        return graph == nullptr ? invalid_value : end_capture_locked(stream, graph);
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamIsCapturing(Handle stream, int* status) {
    return query_capture("cuStreamIsCapturing", stream, {status, nullptr, nullptr, nullptr, nullptr, nullptr});
}

GDRKIT_CUDA_ENTRY Result cuStreamGetCaptureInfo(Handle stream, int* status, std::uint64_t* id) {
    return query_capture("cuStreamGetCaptureInfo", stream, {status, id, nullptr, nullptr, nullptr, nullptr});
}

GDRKIT_CUDA_ENTRY Result cuStreamGetCaptureInfo_v2(Handle stream, int* status, std::uint64_t* id, Handle* graph,
                                                   const Handle** dependencies, std::size_t* dependency_count) {
    return query_capture("cuStreamGetCaptureInfo_v2", stream,
                         {status, id, graph, dependencies, nullptr, dependency_count});
}

GDRKIT_CUDA_ENTRY Result cuStreamGetCaptureInfo_v3(Handle stream, int* status, std::uint64_t* id, Handle* graph,
                                                   const Handle** dependencies, const EdgeData** edges,
                                                   std::size_t* dependency_count) {
    return query_capture("cuStreamGetCaptureInfo_v3", stream,
                         {status, id, graph, dependencies, edges, dependency_count});
}

GDRKIT_CUDA_ENTRY Result cuStreamUpdateCaptureDependencies(Handle handle, Handle* nodes, std::size_t dependency_count,
                                                           unsigned flags) {
    return run_capture_entry("cuStreamUpdateCaptureDependencies", handle,
                             [&](const ContextRef&, const StreamRef& stream) {
                                 return update_dependencies(stream, nodes, nullptr, dependency_count, flags);
                             });
}

GDRKIT_CUDA_ENTRY Result cuStreamUpdateCaptureDependencies_v2(Handle handle, Handle* nodes, const EdgeData* edge_data,
                                                              std::size_t dependency_count, unsigned flags) {
    return run_capture_entry("cuStreamUpdateCaptureDependencies_v2", handle,
                             [&](const ContextRef&, const StreamRef& stream) {
                                 return update_dependencies(stream, nodes, edge_data, dependency_count, flags);
                             });
}

GDRKIT_CUDA_ENTRY Result cuThreadExchangeStreamCaptureMode(int* mode) {
    return run_entry("cuThreadExchangeStreamCaptureMode", [&] {
        if (mode == nullptr || *mode < capture_mode_global || *mode > capture_mode_relaxed) {
            return invalid_value;
        }
        std::swap(*mode, thread_capture_mode());
        return success;
    });
}

} // namespace gdrkit::twin::cuda
