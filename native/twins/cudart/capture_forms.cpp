// Captures of streams and launches of graphs, in the ordinary form and the per-thread form (forms.hpp).
#include "cuda/graph_abi.hpp"
#include "cudart/forms.hpp"

namespace gdrkit::twin::cudart {

GDRKIT_STREAM_FORM(cudaStreamBeginCapture)(Handle stream, int mode) {
    return call_in_context(&Driver::cuStreamBeginCapture_v2, resolve_stream(stream), mode);
}

GDRKIT_STREAM_FORM(cudaStreamBeginCaptureToGraph)
(Handle stream, Handle graph, const Handle* dependencies, const cuda::EdgeData* edge_data, std::size_t count,
 int mode) {
    return call_in_context(&Driver::cuStreamBeginCaptureToGraph, resolve_stream(stream), graph, dependencies, edge_data,
                           count, mode);
}

GDRKIT_STREAM_FORM(cudaStreamEndCapture)(Handle stream, Handle* graph) {
    return call_in_context(&Driver::cuStreamEndCapture, resolve_stream(stream), graph);
}

GDRKIT_STREAM_FORM(cudaStreamIsCapturing)(Handle stream, int* status) {
    return call_in_context(&Driver::cuStreamIsCapturing, resolve_stream(stream), status);
}

// The function whose body follows #endif has the suffix _v2 in CUDA 12.
#if GDRKIT_CUDART_MAJOR == 12
GDRKIT_STREAM_FORM(cudaStreamGetCaptureInfo)(Handle stream, int* status, std::uint64_t* id) {
    return call_in_context(&Driver::cuStreamGetCaptureInfo, resolve_stream(stream), status, id);
}

GDRKIT_STREAM_FORM(cudaStreamGetCaptureInfo_v2)
(Handle stream, int* status, std::uint64_t* id, Handle* graph, const Handle** dependencies, std::size_t* count) {
    return call_in_context(&Driver::cuStreamGetCaptureInfo_v2, resolve_stream(stream), status, id, graph, dependencies,
                           count);
}

GDRKIT_STREAM_FORM(cudaStreamGetCaptureInfo_v3)
(Handle stream, int* status, std::uint64_t* id, Handle* graph, const Handle** dependencies,
 const cuda::EdgeData** edge_data, std::size_t* count) {
    return call_in_context(&Driver::cuStreamGetCaptureInfo_v3, resolve_stream(stream), status, id, graph, dependencies,
                           edge_data, count);
}

GDRKIT_STREAM_FORM(cudaStreamUpdateCaptureDependencies)
(Handle stream, Handle* dependencies, std::size_t count, unsigned flags) {
    return call_in_context(&Driver::cuStreamUpdateCaptureDependencies, resolve_stream(stream), dependencies, count,
                           flags);
}

GDRKIT_STREAM_FORM(cudaStreamUpdateCaptureDependencies_v2)
(Handle stream, Handle* dependencies, const cuda::EdgeData* edge_data, std::size_t count, unsigned flags) {
#else
GDRKIT_STREAM_FORM(cudaStreamGetCaptureInfo)
(Handle stream, int* status, std::uint64_t* id, Handle* graph, const Handle** dependencies,
 const cuda::EdgeData** edge_data, std::size_t* count) {
    return call_in_context(&Driver::cuStreamGetCaptureInfo_v3, resolve_stream(stream), status, id, graph, dependencies,
                           edge_data, count);
}

GDRKIT_STREAM_FORM(cudaStreamUpdateCaptureDependencies)
(Handle stream, Handle* dependencies, const cuda::EdgeData* edge_data, std::size_t count, unsigned flags) {
#endif
    return call_in_context(&Driver::cuStreamUpdateCaptureDependencies_v2, resolve_stream(stream), dependencies,
                           edge_data, count, flags);
}

GDRKIT_STREAM_FORM(cudaGraphInstantiateWithParams)
(Handle* executable, Handle graph, cuda::InstantiateParameters* parameters) {
    return call_in_context(&Driver::cuGraphInstantiateWithParams, executable, graph, parameters);
}

GDRKIT_STREAM_FORM(cudaGraphUpload)(Handle executable, Handle stream) {
    return call_in_context(&Driver::cuGraphUpload, executable, resolve_stream(stream));
}

GDRKIT_STREAM_FORM(cudaGraphLaunch)(Handle executable, Handle stream) {
    return call_in_context(&Driver::cuGraphLaunch, executable, resolve_stream(stream));
}

} // namespace gdrkit::twin::cudart
