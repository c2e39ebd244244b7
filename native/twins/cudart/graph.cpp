// cudaGraph* functions, except the functions that take a stream (capture_forms.cpp). The handles of nodes and graphs
// are the driver's handles.
#include <algorithm>

#include "cuda/graph_abi.hpp"
#include "cudart/entry.hpp"
#include "cudart/rows.hpp"

namespace gdrkit::twin::cudart {
namespace {

struct CopyNodeParameters { // cudaMemcpyNodeParams
    std::int32_t flags;
    std::int32_t reserved[3];
    Copy3d copy;
};

// cudaGraphNodeParams. It differs from the driver's structure only for copies and memsets, for which the driver also
// needs a context.
struct NodeParameters {
    std::int32_t type;
    std::int32_t reserved[3];
    union {
        std::uint64_t words[29];
        CopyNodeParameters copy;
        cuda::FillParameters fill;
        cuda::AllocateParameters allocate;
        cuda::ConditionalParameters conditional;
    };
    std::uint64_t reserved_too;
};
static_assert(sizeof(NodeParameters) == sizeof(cuda::NodeParameterUnion));

// Run `body` with the current context, in which the nodes of a graph run.
template <typename Body> Error run_with_context(Body&& body) {
    return run_entry_in_context([&] {
        Handle context = 0;
        const Error error = call(&Driver::cuCtxGetCurrent, &context);
        return error == success ? body(context) : error;
    });
}

// Convert the description of a copy for the driver, and pass it to `body` with the current context.
template <typename Body> Error run_with_copy(const Copy3d* copy, Body&& body) {
    return run_with_context([&](Handle context) {
        cuda::Copy3d converted{};
        const Error error = convert_copy(copy, &converted);
        return error == success ? body(static_cast<const cuda::Copy3d*>(&converted), context) : error;
    });
}

// Describe a copy of one contiguous range.
Copy3d make_range_copy(void* to, const void* from, std::size_t length_bytes, int kind) {
    return {nullptr,
            {},
            {const_cast<void*>(from), length_bytes, length_bytes, 1},
            nullptr,
            {},
            {to, length_bytes, length_bytes, 1},
            {length_bytes, 1, 1},
            kind};
}

PitchedPointer make_pitched_pointer(const cuda::CopySide3d& side) {
    void* const pointer =
        side.memory_type == cuda::memory_host ? const_cast<void*>(side.host) : reinterpret_cast<void*>(side.device);
    return {pointer, side.pitch_bytes, side.pitch_bytes, side.height};
}

Position make_position(const cuda::CopySide3d& side) {
    return {side.x_bytes, side.y, side.z};
}

// Store the parameters of a copy node. The handles of arrays are not stored, and the kind is always `memcpy_default`.
Error query_copy(Handle node, Copy3d* copy) {
    cuda::Copy3d driver_copy{};
    const Error error = copy == nullptr ? invalid_value : call(&Driver::cuGraphMemcpyNodeGetParams, node, &driver_copy);
    if (error == success) {
        *copy = {nullptr,
                 make_position(driver_copy.from),
                 make_pitched_pointer(driver_copy.from),
                 nullptr,
                 make_position(driver_copy.to),
                 make_pitched_pointer(driver_copy.to),
                 {driver_copy.width_bytes, driver_copy.height, driver_copy.depth},
                 memcpy_default};
    }
    return error;
}

// Add a node with converted parameters, and store the results of the driver (the address of an allocation, the bodies
// of a condition) in *parameters.
Error add_node(Handle* node, Handle graph, const Handle* dependencies, const cuda::EdgeData* edge_data,
               std::size_t count, NodeParameters* parameters, Handle context) {
    if (parameters == nullptr) {
        return invalid_value;
    }
    cuda::NodeParameterUnion driver_parameters{};
    driver_parameters.type = parameters->type;
    std::copy_n(parameters->words, std::size(driver_parameters.words), driver_parameters.words);
    if (parameters->type == cuda::node_copy) {
        driver_parameters.copy = {};
        driver_parameters.copy.context = context;
        if (const Error error = convert_copy(&parameters->copy.copy, &driver_parameters.copy.copy); error != success) {
            return error;
        }
    } else if (parameters->type == cuda::node_fill) {
        driver_parameters.fill = {parameters->fill, context};
    }
    const Error error =
        call(&Driver::cuGraphAddNode_v2, node, graph, dependencies, edge_data, count, &driver_parameters);
    if (error == success && parameters->type == cuda::node_allocate) {
        parameters->allocate.pointer = driver_parameters.allocate.pointer;
    }
    if (error == success && parameters->type == cuda::node_conditional) {
        parameters->conditional.bodies = driver_parameters.conditional.bodies;
    }
    return error;
}

} // namespace

// Defines a function of the runtime that passes its arguments to a function of the driver.
#define FORWARD(name, driver_name, parameters, ...)                                                                    \
    GDRKIT_CUDART_ENTRY Error name parameters {                                                                        \
        return call_in_context(&Driver::driver_name, __VA_ARGS__);                                                     \
    }

FORWARD(cudaDeviceGetGraphMemAttribute, cuDeviceGetGraphMemAttribute, (Device device, int attribute, void* value),
        device, attribute, value)
FORWARD(cudaDeviceSetGraphMemAttribute, cuDeviceSetGraphMemAttribute, (Device device, int attribute, void* value),
        device, attribute, value)
FORWARD(cudaDeviceGraphMemTrim, cuDeviceGraphMemTrim, (Device device), device)
FORWARD(cudaGraphCreate, cuGraphCreate, (Handle * graph, unsigned flags), graph, flags)
FORWARD(cudaGraphDestroy, cuGraphDestroy, (Handle graph), graph)
FORWARD(cudaGraphClone, cuGraphClone, (Handle * clone, Handle original), clone, original)
FORWARD(cudaGraphNodeFindInClone, cuGraphNodeFindInClone, (Handle * node, Handle original, Handle clone), node,
        original, clone)
FORWARD(cudaGraphDestroyNode, cuGraphDestroyNode, (Handle node), node)
FORWARD(cudaGraphNodeGetType, cuGraphNodeGetType, (Handle node, int* type), node, type)
FORWARD(cudaGraphGetNodes, cuGraphGetNodes, (Handle graph, Handle* nodes, std::size_t* count), graph, nodes, count)
FORWARD(cudaGraphGetRootNodes, cuGraphGetRootNodes, (Handle graph, Handle* nodes, std::size_t* count), graph, nodes,
        count)
FORWARD(cudaGraphDebugDotPrint, cuGraphDebugDotPrint, (Handle graph, const char* path, unsigned flags), graph, path,
        flags)

#if GDRKIT_CUDART_MAJOR == 12
// CUDA 12 has two functions of each of these names: one without edge data, and one with edge data and the suffix _v2.
#define WITH_EDGES(name) name##_v2
FORWARD(cudaGraphGetEdges, cuGraphGetEdges, (Handle graph, Handle* from, Handle* to, std::size_t* count), graph, from,
        to, count)
FORWARD(cudaGraphNodeGetDependencies, cuGraphNodeGetDependencies, (Handle node, Handle* nodes, std::size_t* count),
        node, nodes, count)
FORWARD(cudaGraphNodeGetDependentNodes, cuGraphNodeGetDependentNodes, (Handle node, Handle* nodes, std::size_t* count),
        node, nodes, count)
FORWARD(cudaGraphAddDependencies, cuGraphAddDependencies,
        (Handle graph, const Handle* from, const Handle* to, std::size_t count), graph, from, to, count)
FORWARD(cudaGraphRemoveDependencies, cuGraphRemoveDependencies,
        (Handle graph, const Handle* from, const Handle* to, std::size_t count), graph, from, to, count)

GDRKIT_CUDART_ENTRY Error cudaGraphAddNode(Handle* node, Handle graph, const Handle* dependencies, std::size_t count,
                                           NodeParameters* parameters) {
    return run_with_context(
        [&](Handle context) { return add_node(node, graph, dependencies, nullptr, count, parameters, context); });
}
#else
#define WITH_EDGES(name) name
#endif

FORWARD(WITH_EDGES(cudaGraphGetEdges), cuGraphGetEdges_v2,
        (Handle graph, Handle* from, Handle* to, cuda::EdgeData* edge_data, std::size_t* count), graph, from, to,
        edge_data, count)
FORWARD(WITH_EDGES(cudaGraphNodeGetDependencies), cuGraphNodeGetDependencies_v2,
        (Handle node, Handle* nodes, cuda::EdgeData* edge_data, std::size_t* count), node, nodes, edge_data, count)
FORWARD(WITH_EDGES(cudaGraphNodeGetDependentNodes), cuGraphNodeGetDependentNodes_v2,
        (Handle node, Handle* nodes, cuda::EdgeData* edge_data, std::size_t* count), node, nodes, edge_data, count)
FORWARD(WITH_EDGES(cudaGraphAddDependencies), cuGraphAddDependencies_v2,
        (Handle graph, const Handle* from, const Handle* to, const cuda::EdgeData* edge_data, std::size_t count), graph,
        from, to, edge_data, count)
FORWARD(WITH_EDGES(cudaGraphRemoveDependencies), cuGraphRemoveDependencies_v2,
        (Handle graph, const Handle* from, const Handle* to, const cuda::EdgeData* edge_data, std::size_t count), graph,
        from, to, edge_data, count)

GDRKIT_CUDART_ENTRY Error WITH_EDGES(cudaGraphAddNode)(Handle* node, Handle graph, const Handle* dependencies,
                                                       const cuda::EdgeData* edge_data, std::size_t count,
                                                       NodeParameters* parameters) {
    return run_with_context(
        [&](Handle context) { return add_node(node, graph, dependencies, edge_data, count, parameters, context); });
}

FORWARD(cudaGraphConditionalHandleCreate, cuGraphConditionalHandleCreate,
        (Handle * condition, Handle graph, unsigned value, unsigned flags), condition, graph, Handle{0}, value, flags)
#if GDRKIT_CUDART_MAJOR == 13
FORWARD(cudaGraphConditionalHandleCreate_v2, cuGraphConditionalHandleCreate,
        (Handle * condition, Handle graph, Handle context, unsigned value, unsigned flags), condition, graph, context,
        value, flags)
#endif

FORWARD(cudaGraphAddEmptyNode, cuGraphAddEmptyNode,
        (Handle * node, Handle graph, const Handle* dependencies, std::size_t count), node, graph, dependencies, count)
FORWARD(cudaGraphAddHostNode, cuGraphAddHostNode,
        (Handle * node, Handle graph, const Handle* dependencies, std::size_t count, const cuda::HostParameters* host),
        node, graph, dependencies, count, host)
FORWARD(cudaGraphAddChildGraphNode, cuGraphAddChildGraphNode,
        (Handle * node, Handle graph, const Handle* dependencies, std::size_t count, Handle child), node, graph,
        dependencies, count, child)
FORWARD(cudaGraphAddEventRecordNode, cuGraphAddEventRecordNode,
        (Handle * node, Handle graph, const Handle* dependencies, std::size_t count, Handle event), node, graph,
        dependencies, count, event)
FORWARD(cudaGraphAddEventWaitNode, cuGraphAddEventWaitNode,
        (Handle * node, Handle graph, const Handle* dependencies, std::size_t count, Handle event), node, graph,
        dependencies, count, event)
FORWARD(cudaGraphAddMemAllocNode, cuGraphAddMemAllocNode,
        (Handle * node, Handle graph, const Handle* dependencies, std::size_t count,
         cuda::AllocateParameters* parameters),
        node, graph, dependencies, count, parameters)
FORWARD(cudaGraphAddMemFreeNode, cuGraphAddMemFreeNode,
        (Handle * node, Handle graph, const Handle* dependencies, std::size_t count, void* pointer), node, graph,
        dependencies, count, to_address(pointer))

GDRKIT_CUDART_ENTRY Error cudaGraphAddMemcpyNode(Handle* node, Handle graph, const Handle* dependencies,
                                                 std::size_t count, const Copy3d* copy) {
    return run_with_copy(copy, [&](const cuda::Copy3d* converted, Handle context) {
        return call(&Driver::cuGraphAddMemcpyNode, node, graph, dependencies, count, converted, context);
    });
}

GDRKIT_CUDART_ENTRY Error cudaGraphAddMemcpyNode1D(Handle* node, Handle graph, const Handle* dependencies,
                                                   std::size_t count, void* to, const void* from,
                                                   std::size_t length_bytes, int kind) {
    const Copy3d copy = make_range_copy(to, from, length_bytes, kind);
    return cudaGraphAddMemcpyNode(node, graph, dependencies, count, &copy);
}

GDRKIT_CUDART_ENTRY Error cudaGraphAddMemsetNode(Handle* node, Handle graph, const Handle* dependencies,
                                                 std::size_t count, const cuda::FillParameters* fill) {
    return run_with_context([&](Handle context) {
        return call(&Driver::cuGraphAddMemsetNode, node, graph, dependencies, count, fill, context);
    });
}

GDRKIT_CUDART_ENTRY Error cudaGraphMemcpyNodeGetParams(Handle node, Copy3d* copy) {
    return run_entry_in_context([&] { return query_copy(node, copy); });
}

GDRKIT_CUDART_ENTRY Error cudaGraphMemcpyNodeSetParams(Handle node, const Copy3d* copy) {
    return run_with_copy(copy, [&](const cuda::Copy3d* converted, Handle) {
        return call(&Driver::cuGraphMemcpyNodeSetParams, node, converted);
    });
}

GDRKIT_CUDART_ENTRY Error cudaGraphMemcpyNodeSetParams1D(Handle node, void* to, const void* from,
                                                         std::size_t length_bytes, int kind) {
    const Copy3d copy = make_range_copy(to, from, length_bytes, kind);
    return cudaGraphMemcpyNodeSetParams(node, &copy);
}

FORWARD(cudaGraphMemsetNodeGetParams, cuGraphMemsetNodeGetParams, (Handle node, cuda::FillParameters* fill), node, fill)
FORWARD(cudaGraphMemsetNodeSetParams, cuGraphMemsetNodeSetParams, (Handle node, const cuda::FillParameters* fill), node,
        fill)
FORWARD(cudaGraphHostNodeGetParams, cuGraphHostNodeGetParams, (Handle node, cuda::HostParameters* host), node, host)
FORWARD(cudaGraphHostNodeSetParams, cuGraphHostNodeSetParams, (Handle node, const cuda::HostParameters* host), node,
        host)
FORWARD(cudaGraphChildGraphNodeGetGraph, cuGraphChildGraphNodeGetGraph, (Handle node, Handle* graph), node, graph)
FORWARD(cudaGraphEventRecordNodeGetEvent, cuGraphEventRecordNodeGetEvent, (Handle node, Handle* event), node, event)
FORWARD(cudaGraphEventRecordNodeSetEvent, cuGraphEventRecordNodeSetEvent, (Handle node, Handle event), node, event)
FORWARD(cudaGraphEventWaitNodeGetEvent, cuGraphEventWaitNodeGetEvent, (Handle node, Handle* event), node, event)
FORWARD(cudaGraphEventWaitNodeSetEvent, cuGraphEventWaitNodeSetEvent, (Handle node, Handle event), node, event)
FORWARD(cudaGraphMemAllocNodeGetParams, cuGraphMemAllocNodeGetParams,
        (Handle node, cuda::AllocateParameters* parameters), node, parameters)
FORWARD(cudaGraphMemFreeNodeGetParams, cuGraphMemFreeNodeGetParams, (Handle node, Address* pointer), node, pointer)

FORWARD(cudaGraphInstantiate, cuGraphInstantiateWithFlags, (Handle * executable, Handle graph, std::uint64_t flags),
        executable, graph, flags)
FORWARD(cudaGraphInstantiateWithFlags, cuGraphInstantiateWithFlags,
        (Handle * executable, Handle graph, std::uint64_t flags), executable, graph, flags)
FORWARD(cudaGraphExecDestroy, cuGraphExecDestroy, (Handle executable), executable)
FORWARD(cudaGraphExecGetFlags, cuGraphExecGetFlags, (Handle executable, std::uint64_t* flags), executable, flags)
FORWARD(cudaGraphExecUpdate, cuGraphExecUpdate_v2,
        (Handle executable, Handle graph, cuda::UpdateInformation* information), executable, graph, information)
FORWARD(cudaGraphExecHostNodeSetParams, cuGraphExecHostNodeSetParams,
        (Handle executable, Handle node, const cuda::HostParameters* host), executable, node, host)
FORWARD(cudaGraphExecEventRecordNodeSetEvent, cuGraphExecEventRecordNodeSetEvent,
        (Handle executable, Handle node, Handle event), executable, node, event)
FORWARD(cudaGraphExecEventWaitNodeSetEvent, cuGraphExecEventWaitNodeSetEvent,
        (Handle executable, Handle node, Handle event), executable, node, event)
FORWARD(cudaGraphNodeSetEnabled, cuGraphNodeSetEnabled, (Handle executable, Handle node, unsigned is_enabled),
        executable, node, is_enabled)
FORWARD(cudaGraphNodeGetEnabled, cuGraphNodeGetEnabled, (Handle executable, Handle node, unsigned* is_enabled),
        executable, node, is_enabled)

FORWARD(cudaUserObjectCreate, cuUserObjectCreate,
        (Handle * object, void* pointer, void (*destroy)(void*), unsigned count, unsigned flags), object, pointer,
        destroy, count, flags)
FORWARD(cudaUserObjectRetain, cuUserObjectRetain, (Handle object, unsigned count), object, count)
FORWARD(cudaUserObjectRelease, cuUserObjectRelease, (Handle object, unsigned count), object, count)
FORWARD(cudaGraphRetainUserObject, cuGraphRetainUserObject,
        (Handle graph, Handle object, unsigned count, unsigned flags), graph, object, count, flags)
FORWARD(cudaGraphReleaseUserObject, cuGraphReleaseUserObject, (Handle graph, Handle object, unsigned count), graph,
        object, count)

GDRKIT_CUDART_ENTRY Error cudaGraphExecMemcpyNodeSetParams(Handle executable, Handle node, const Copy3d* copy) {
    return run_with_copy(copy, [&](const cuda::Copy3d* converted, Handle context) {
        return call(&Driver::cuGraphExecMemcpyNodeSetParams, executable, node, converted, context);
    });
}

GDRKIT_CUDART_ENTRY Error cudaGraphExecMemcpyNodeSetParams1D(Handle executable, Handle node, void* to, const void* from,
                                                             std::size_t length_bytes, int kind) {
    const Copy3d copy = make_range_copy(to, from, length_bytes, kind);
    return cudaGraphExecMemcpyNodeSetParams(executable, node, &copy);
}

GDRKIT_CUDART_ENTRY Error cudaGraphExecMemsetNodeSetParams(Handle executable, Handle node,
                                                           const cuda::FillParameters* fill) {
    return run_with_context(
        [&](Handle context) { return call(&Driver::cuGraphExecMemsetNodeSetParams, executable, node, fill, context); });
}

} // namespace gdrkit::twin::cudart
