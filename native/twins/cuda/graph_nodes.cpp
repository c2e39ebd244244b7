// Nodes of graphs: the functions that add nodes (cuGraphAdd*Node), and that query and change their parameters.
#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/conditional.hpp"
#include "cuda/copy.hpp"
#include "cuda/device.hpp"
#include "cuda/event.hpp"
#include "cuda/fill.hpp"
#include "cuda/graph.hpp"

namespace gdrkit::twin::cuda {
namespace {

// The arguments that every cuGraphAdd*Node function has: the graph, and the nodes on which the new node depends.
struct Insertion {
    Handle graph;
    const Handle* dependencies;
    std::size_t dependency_count;
};

Result add_to_graph(Handle* node_handle, const Insertion& insertion, NodeParameters parameters) {
    const GraphRef graph = find_graph(insertion.graph);
    std::vector<NodeRef> dependencies;
    if (node_handle == nullptr || !graph) {
        return invalid_value;
    }
    Result result = find_nodes(*graph, insertion.dependencies, insertion.dependency_count, &dependencies);
    if (result == success) {
        result = check_parameters(parameters);
    }
    if (result == success) {
        *node_handle = add_node(graph, std::move(parameters), std::move(dependencies))->handle;
    }
    return result;
}

// Add a node that frees memory. Fail if another node of the graph already frees the address.
Result add_free_node(Handle* node_handle, const Insertion& insertion, DevicePointer pointer) {
    const GraphRef graph = find_graph(insertion.graph);
    const bool has_free_node = graph && std::ranges::any_of(graph->nodes, [=](const NodeRef& node) {
                                   const auto* const free = std::get_if<FreeNode>(&node->parameters);
                                   return free != nullptr && free->pointer == pointer;
                               });
    return has_free_node ? invalid_value : add_to_graph(node_handle, insertion, FreeNode{pointer});
}

Result add_child_node(Handle* node_handle, const Insertion& insertion, Handle child) {
    const GraphRef graph = find_graph(child);
    if (!graph || child == insertion.graph || has_uncopyable_nodes(*graph)) {
        return invalid_value;
    }
    GraphRef copy = clone_graph(*graph);
    copy->is_child = true;
    return add_to_graph(node_handle, insertion, ChildNode{std::move(copy)});
}

Result add_allocation_node(Handle* node_handle, const Insertion& insertion, AllocateParameters* parameters) {
    AllocateNode node;
    const Result result = make_allocation(parameters, &node);
    return result == success ? add_to_graph(node_handle, insertion, std::move(node)) : result;
}

Result add_conditional_node(Handle* node_handle, const Insertion& insertion, ConditionalParameters* parameters) {
    const GraphRef graph = find_graph(insertion.graph);
    std::vector<NodeRef> dependencies;
    ConditionalNode node;
    if (node_handle == nullptr || !graph) {
        return invalid_value;
    }
    // make_conditional() marks the condition as used, so check the dependencies first.
    Result result = find_nodes(*graph, insertion.dependencies, insertion.dependency_count, &dependencies);
    if (result == success) {
        result = make_conditional(graph, parameters, &node);
    }
    return result == success ? add_to_graph(node_handle, insertion, std::move(node)) : result;
}

// Add a node of any type (cuGraphAddNode).
Result add_any_node(Handle* node_handle, const Insertion& insertion, NodeParameterUnion* parameters) {
    if (parameters == nullptr) {
        return invalid_value;
    }
    switch (parameters->type) {
    case node_copy:
        return add_to_graph(node_handle, insertion, CopyNode{parameters->copy.copy, parameters->copy.context});
    case node_fill:
        return add_to_graph(node_handle, insertion, FillNode{parameters->fill.fill, parameters->fill.context});
    case node_host:
        return add_to_graph(node_handle, insertion, parameters->host);
    case node_graph:
        return add_child_node(node_handle, insertion, parameters->graph);
    case node_empty:
        return add_to_graph(node_handle, insertion, EmptyNode{});
    case node_wait_event:
        return add_to_graph(node_handle, insertion, WaitNode{parameters->event});
    case node_record_event:
        return add_to_graph(node_handle, insertion, RecordNode{parameters->event});
    case node_allocate:
        return add_allocation_node(node_handle, insertion, &parameters->allocate);
    case node_free:
        return add_free_node(node_handle, insertion, parameters->free);
    case node_conditional:
        return add_conditional_node(node_handle, insertion, &parameters->conditional);
    default:
        return not_supported;
    }
}

// Run `body` with the parameters of a node, or fail with invalid_value if the node is not of this type.
template <typename Type, typename Body>
Result run_with_parameters(std::string_view symbol, Handle handle, Body&& body) {
    return run_with_node(symbol, handle, [&](const NodeRef& node) {
        auto* const parameters = std::get_if<Type>(&node->parameters);
        return parameters == nullptr ? invalid_value : body(parameters);
    });
}

template <typename Value> Result store_value(Value* output, const Value& value) {
    if (output == nullptr) {
        return invalid_value;
    }
    *output = value;
    return success;
}

// Check new parameters of a node. If they are valid, replace the old parameters.
template <typename Type> Result replace_parameters(Type* parameters, Type replacement) {
    const Result result = check_parameters(replacement);
    if (result == success) {
        *parameters = std::move(replacement);
    }
    return result;
}

Result find_node_context(Handle handle, ContextRef* context) {
    return handle == 0 ? find_current_context(context) : find_context(handle, context);
}

Result check_copy(const CopyNode& node) {
    ContextRef context;
    CopyRequest request;
    std::function<void()> unused_work;
    if (const Result result = find_node_context(node.context, &context); result != success) {
        return result;
    }
    if (const Result result = make_copy_request(&node.copy, &request); result != success) {
        return result;
    }
    // The memory of an allocation node need not exist before the launch, so only the launch can check the copy.
    if (is_graph_memory(request.to.address) || is_graph_memory(request.from.address)) {
        return success;
    }
    return prepare_copy(context, request, &unused_work);
}

Result check_fill(const FillNode& node) {
    ContextRef context;
    std::function<void()> unused_work;
    const Result result = find_node_context(node.context, &context);
    return result != success || is_graph_memory(node.fill.to) ? result : prepare_fill(context, node.fill, &unused_work);
}

Result check_event(Handle event) {
    return event_exists(event) ? success : invalid_value;
}

} // namespace

Result check_parameters(const NodeParameters& parameters) {
    if (const auto* const copy = std::get_if<CopyNode>(&parameters)) {
        return check_copy(*copy);
    }
    if (const auto* const fill = std::get_if<FillNode>(&parameters)) {
        return check_fill(*fill);
    }
    if (const auto* const host = std::get_if<HostParameters>(&parameters)) {
        return host->function == nullptr ? invalid_value : success;
    }
    if (const auto* const record = std::get_if<RecordNode>(&parameters)) {
        return check_event(record->event);
    }
    if (const auto* const wait = std::get_if<WaitNode>(&parameters)) {
        return check_event(wait->event);
    }
    if (const auto* const free = std::get_if<FreeNode>(&parameters)) {
        return is_graph_memory(free->pointer) ? success : invalid_value;
    }
    return success;
}

Result make_allocation(AllocateParameters* parameters, AllocateNode* node) {
    if (parameters == nullptr || parameters->length_bytes == 0 ||
        (parameters->access == nullptr && parameters->access_count != 0) ||
        parameters->pool.allocation_type != allocation_pinned || parameters->pool.handle_types != handle_none ||
        parameters->pool.location.type != location_device || !device_exists(parameters->pool.location.id)) {
        return invalid_value;
    }
    auto memory = std::make_shared<GraphMemory>();
    memory->device = parameters->pool.location.id;
    memory->length_bytes = parameters->length_bytes;
    for (const AccessDescription& access : std::span(parameters->access, parameters->access_count)) {
        if (access.location.type != location_device || !device_exists(access.location.id)) {
            return invalid_value;
        }
        memory->access[access.location.id] = access.flags;
    }
    memory->slot = allocate_address_slot(parameters->length_bytes);
    if (memory->slot.base == 0) {
        return out_of_memory;
    }
    register_graph_memory(memory.get());
    parameters->pointer = memory->slot.base;
    node->parameters = *parameters;
    // `access` refers to an array of the program, which may not exist after the call.
    node->parameters.access = nullptr;
    node->parameters.access_count = 0;
    node->memory = std::move(memory);
    return success;
}

GDRKIT_CUDA_ENTRY Result cuGraphAddEmptyNode(Handle* node, Handle graph, const Handle* dependencies,
                                             std::size_t dependency_count) {
    return run_entry_with_graph_lock("cuGraphAddEmptyNode", [&] {
        return add_to_graph(node, {graph, dependencies, dependency_count}, EmptyNode{});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddMemcpyNode(Handle* node, Handle graph, const Handle* dependencies,
                                              std::size_t dependency_count, const Copy3d* copy, Handle context) {
    return run_entry_with_graph_lock("cuGraphAddMemcpyNode", [&] {
        return copy == nullptr ? invalid_value
                               : add_to_graph(node, {graph, dependencies, dependency_count}, CopyNode{*copy, context});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddMemsetNode(Handle* node, Handle graph, const Handle* dependencies,
                                              std::size_t dependency_count, const FillParameters* fill,
                                              Handle context) {
    return run_entry_with_graph_lock("cuGraphAddMemsetNode", [&] {
        return fill == nullptr ? invalid_value
                               : add_to_graph(node, {graph, dependencies, dependency_count}, FillNode{*fill, context});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddHostNode(Handle* node, Handle graph, const Handle* dependencies,
                                            std::size_t dependency_count, const HostParameters* host) {
    return run_entry_with_graph_lock("cuGraphAddHostNode", [&] {
        return host == nullptr ? invalid_value : add_to_graph(node, {graph, dependencies, dependency_count}, *host);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddChildGraphNode(Handle* node, Handle graph, const Handle* dependencies,
                                                  std::size_t dependency_count, Handle child) {
    return run_entry_with_graph_lock("cuGraphAddChildGraphNode", [&] {
        return add_child_node(node, {graph, dependencies, dependency_count}, child);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddEventRecordNode(Handle* node, Handle graph, const Handle* dependencies,
                                                   std::size_t dependency_count, Handle event) {
    return run_entry_with_graph_lock("cuGraphAddEventRecordNode", [&] {
        return add_to_graph(node, {graph, dependencies, dependency_count}, RecordNode{event});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddEventWaitNode(Handle* node, Handle graph, const Handle* dependencies,
                                                 std::size_t dependency_count, Handle event) {
    return run_entry_with_graph_lock("cuGraphAddEventWaitNode", [&] {
        return add_to_graph(node, {graph, dependencies, dependency_count}, WaitNode{event});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddMemAllocNode(Handle* node, Handle graph, const Handle* dependencies,
                                                std::size_t dependency_count, AllocateParameters* parameters) {
    return run_entry_with_graph_lock("cuGraphAddMemAllocNode", [&] {
        return add_allocation_node(node, {graph, dependencies, dependency_count}, parameters);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddMemFreeNode(Handle* node, Handle graph, const Handle* dependencies,
                                               std::size_t dependency_count, DevicePointer pointer) {
    return run_entry_with_graph_lock("cuGraphAddMemFreeNode", [&] {
        return add_free_node(node, {graph, dependencies, dependency_count}, pointer);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddNode(Handle* node, Handle graph, const Handle* dependencies,
                                        std::size_t dependency_count, NodeParameterUnion* parameters) {
    return run_entry_with_graph_lock("cuGraphAddNode", [&] {
        return add_any_node(node, {graph, dependencies, dependency_count}, parameters);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddNode_v2(Handle* node, Handle graph, const Handle* dependencies,
                                           const EdgeData* edge_data, std::size_t dependency_count,
                                           NodeParameterUnion* parameters) {
    return run_entry_with_graph_lock("cuGraphAddNode_v2", [&] {
        return is_default_edge_data(edge_data, dependency_count)
                   ? add_any_node(node, {graph, dependencies, dependency_count}, parameters)
                   : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphMemcpyNodeGetParams(Handle node, Copy3d* copy) {
    return run_with_parameters<CopyNode>("cuGraphMemcpyNodeGetParams", node,
                                         [&](CopyNode* parameters) { return store_value(copy, parameters->copy); });
}

GDRKIT_CUDA_ENTRY Result cuGraphMemcpyNodeSetParams(Handle node, const Copy3d* copy) {
    return run_with_parameters<CopyNode>("cuGraphMemcpyNodeSetParams", node, [&](CopyNode* parameters) {
        return copy == nullptr ? invalid_value : replace_parameters(parameters, CopyNode{*copy, parameters->context});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphMemsetNodeGetParams(Handle node, FillParameters* fill) {
    return run_with_parameters<FillNode>("cuGraphMemsetNodeGetParams", node,
                                         [&](FillNode* parameters) { return store_value(fill, parameters->fill); });
}

GDRKIT_CUDA_ENTRY Result cuGraphMemsetNodeSetParams(Handle node, const FillParameters* fill) {
    return run_with_parameters<FillNode>("cuGraphMemsetNodeSetParams", node, [&](FillNode* parameters) {
        return fill == nullptr ? invalid_value : replace_parameters(parameters, FillNode{*fill, parameters->context});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphHostNodeGetParams(Handle node, HostParameters* host) {
    return run_with_parameters<HostParameters>(
        "cuGraphHostNodeGetParams", node, [&](HostParameters* parameters) { return store_value(host, *parameters); });
}

GDRKIT_CUDA_ENTRY Result cuGraphHostNodeSetParams(Handle node, const HostParameters* host) {
    return run_with_parameters<HostParameters>("cuGraphHostNodeSetParams", node, [&](HostParameters* parameters) {
        return host == nullptr ? invalid_value : replace_parameters(parameters, *host);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphChildGraphNodeGetGraph(Handle node, Handle* graph) {
    return run_with_parameters<ChildNode>("cuGraphChildGraphNodeGetGraph", node, [&](ChildNode* parameters) {
        return store_value(graph, parameters->graph->handle);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphEventRecordNodeGetEvent(Handle node, Handle* event) {
    return run_with_parameters<RecordNode>("cuGraphEventRecordNodeGetEvent", node, [&](RecordNode* parameters) {
        return store_value(event, parameters->event);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphEventRecordNodeSetEvent(Handle node, Handle event) {
    return run_with_parameters<RecordNode>("cuGraphEventRecordNodeSetEvent", node, [&](RecordNode* parameters) {
        return replace_parameters(parameters, RecordNode{event});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphEventWaitNodeGetEvent(Handle node, Handle* event) {
    return run_with_parameters<WaitNode>("cuGraphEventWaitNodeGetEvent", node,
                                         [&](WaitNode* parameters) { return store_value(event, parameters->event); });
}

GDRKIT_CUDA_ENTRY Result cuGraphEventWaitNodeSetEvent(Handle node, Handle event) {
    return run_with_parameters<WaitNode>("cuGraphEventWaitNodeSetEvent", node, [&](WaitNode* parameters) {
        return replace_parameters(parameters, WaitNode{event});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphMemAllocNodeGetParams(Handle node, AllocateParameters* output) {
    return run_with_parameters<AllocateNode>("cuGraphMemAllocNodeGetParams", node, [&](AllocateNode* parameters) {
        return store_value(output, parameters->parameters);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphMemFreeNodeGetParams(Handle node, DevicePointer* pointer) {
    return run_with_parameters<FreeNode>("cuGraphMemFreeNodeGetParams", node, [&](FreeNode* parameters) {
        return store_value(pointer, parameters->pointer);
    });
}

} // namespace gdrkit::twin::cuda
