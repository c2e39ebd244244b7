// Executable graphs: instantiation, updates and launches.
#include <algorithm>
#include <utility>

#include "cuda/capture.hpp"
#include "cuda/conditional.hpp"
#include "cuda/graph_launch.hpp"
#include "cuda/registry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// An executable graph. `graph` is a copy of the original graph, and each node of the copy has the handle of its
// original in `original_handle`.
struct Executable {
    Handle handle = 0;
    GraphRef graph;
    std::uint64_t flags = 0;
    std::vector<Handle> disabled_nodes; // handles of nodes of the original graph
    MarkerRef last_launch;              // marker of the last launch, for which the next launch waits, or null
};
using ExecutableRef = std::shared_ptr<Executable>;

Registry<Executable>& executables() {
    static auto* const instance = new Registry<Executable>("cuda_graph_executable");
    return *instance;
}

bool has_cycle(const Graph& graph) {
    // draw_random_order() leaves out the nodes of a cycle.
    return draw_random_order(graph).size() != graph.nodes.size() ||
           std::ranges::any_of(graph.nodes, [](const NodeRef& node) {
               const auto* const child = std::get_if<ChildNode>(&node->parameters);
               const auto* const conditional = std::get_if<ConditionalNode>(&node->parameters);
               return (child != nullptr && has_cycle(*child->graph)) ||
                      (conditional != nullptr &&
                       std::ranges::any_of(conditional->bodies, [](const GraphRef& body) { return has_cycle(*body); }));
           });
}

// Create an executable graph with copies of the nodes of a graph. Later changes of the graph do not affect it.
Result instantiate_graph(Handle* executable_handle, Handle graph_handle, std::uint64_t flags) {
    const GraphRef graph = find_graph(graph_handle);
    constexpr std::uint64_t supported_flags = instantiate_auto_free | instantiate_upload | instantiate_node_priority;
    if (executable_handle == nullptr || !graph || graph->is_capturing) {
        return invalid_value;
    }
    if ((flags & ~supported_flags) != 0) {
        return flags == instantiate_device_launch ? not_supported : invalid_value;
    }
    // A graph that allocates or frees memory can have only one executable graph at a time.
    if (has_cycle(*graph) || (has_memory_nodes(*graph) && !graph->live_executable.expired())) {
        return invalid_value;
    }
    if (const Result result = check_conditionals(*graph); result != success) {
        return result;
    }
    auto executable = std::make_shared<Executable>();
    executable->handle = make_handle();
    executable->graph = clone_graph(*graph);
    executable->flags = flags;
    if (has_memory_nodes(*graph)) {
        graph->live_executable = executable;
    }
    executables().add(executable->handle, executable);
    *executable_handle = executable->handle;
    return success;
}

// Enqueue the work of an executable graph in a stream. If the stream is being captured, add a node that runs the graph
// to the captured graph instead.
Result launch_graph(const ContextRef& context, Handle executable_handle, Handle stream_handle) {
    const ExecutableRef executable = executables().find(executable_handle);
    StreamRef stream;
    if (!executable) {
        return invalid_value;
    }
    if (const Result result = find_stream(stream_handle, context, &stream, CapturePolicy::allow); result != success) {
        return result;
    }
    if (stream->capture) {
        if (has_uncopyable_nodes(*executable->graph)) {
            return not_supported;
        }
        GraphRef child = clone_graph(*executable->graph);
        child->is_child = true;
        return capture_node_locked(stream, ChildNode{std::move(child)});
    }
    const ContextRef stream_context = stream->context.lock();
    std::function<void()> work;
    if (const Result result = prepare_launch(stream_context ? stream_context : context, *executable->graph,
                                             executable->flags, executable->disabled_nodes, &work);
        result != success) {
        return result;
    }
    std::vector<MarkerRef> dependencies;
    if (executable->last_launch) {
        dependencies.push_back(executable->last_launch);
    }
    executable->last_launch = enqueue(stream, std::move(work), Timing::delayed, std::move(dependencies));
    return success;
}

// Replace the parameters of the nodes of an executable graph by the parameters of another graph. Fail with
// graph_update_failure if the graphs have different nodes or dependencies, or if they allocate or free memory. The
// nodes are matched by the order in which they were added.
Result update_graph(Handle executable_handle, Handle graph_handle, UpdateInformation* information) {
    const ExecutableRef executable = executables().find(executable_handle);
    const GraphRef graph = find_graph(graph_handle);
    *information = {update_error, 0, 0};
    if (!executable || !graph) {
        return invalid_value;
    }
    const auto fail = [&](UpdateResult result, Handle node) {
        *information = {result, node, 0};
        return graph_update_failure;
    };
    const auto &executable_nodes = executable->graph->nodes, &new_nodes = graph->nodes;
    if (executable_nodes.size() != new_nodes.size()) {
        return fail(update_topology_changed, 0);
    }
    const auto find_index = [](const auto& nodes, const NodeRef& node) {
        return std::ranges::find(nodes, node) - nodes.begin();
    };
    for (std::size_t node_index = 0; node_index < executable_nodes.size(); ++node_index) {
        if (executable_nodes[node_index]->dependencies.size() != new_nodes[node_index]->dependencies.size()) {
            return fail(update_topology_changed, new_nodes[node_index]->handle);
        }
        for (std::size_t dependency_index = 0; dependency_index < executable_nodes[node_index]->dependencies.size();
             ++dependency_index) {
            if (find_index(executable_nodes, executable_nodes[node_index]->dependencies[dependency_index]) !=
                find_index(new_nodes, new_nodes[node_index]->dependencies[dependency_index])) {
                return fail(update_topology_changed, new_nodes[node_index]->handle);
            }
        }
        if (get_node_type(*executable_nodes[node_index]) != get_node_type(*new_nodes[node_index])) {
            return fail(update_node_type_changed, new_nodes[node_index]->handle);
        }
        const auto* const conditional = std::get_if<ConditionalNode>(&executable_nodes[node_index]->parameters);
        if (get_node_type(*executable_nodes[node_index]) == node_allocate ||
            get_node_type(*executable_nodes[node_index]) == node_free ||
            (conditional != nullptr &&
             !have_same_structure(*conditional, std::get<ConditionalNode>(new_nodes[node_index]->parameters)))) {
            return fail(update_parameters_changed, new_nodes[node_index]->handle);
        }
    }
    const GraphRef new_clone = clone_graph(*graph);
    for (std::size_t node_index = 0; node_index < executable_nodes.size(); ++node_index) {
        executable_nodes[node_index]->parameters = new_clone->nodes[node_index]->parameters;
    }
    *information = {update_success, 0, 0};
    return success;
}

// Return the node of an executable graph that was cloned from this node of the original graph; null if there is none.
NodeRef find_clone(const ExecutableRef& executable, Handle original_handle) {
    if (!executable || original_handle == 0) {
        return nullptr;
    }
    const auto& nodes = executable->graph->nodes;
    const auto entry =
        std::ranges::find(nodes, original_handle, [](const NodeRef& node) { return node->original_handle; });
    return entry == nodes.end() ? nullptr : *entry;
}

// Replace the parameters that an executable graph has for a node of its original graph.
template <typename Type> Result set_parameters(Handle executable_handle, Handle node_handle, Type parameters) {
    const NodeRef node = find_clone(executables().find(executable_handle), node_handle);
    if (!node || !std::holds_alternative<Type>(node->parameters)) {
        return invalid_value;
    }
    const Result result = check_parameters(parameters);
    if (result == success) {
        node->parameters = std::move(parameters);
    }
    return result;
}

// Find an executable graph and check that the program can disable its node: CUDA allows this only for copies, memsets
// and kernels, and the twin has no kernels.
Result find_executable_with_disableable_node(Handle executable_handle, Handle node_handle, ExecutableRef* executable) {
    *executable = executables().find(executable_handle);
    const NodeRef node = find_clone(*executable, node_handle);
    return node && (get_node_type(*node) == node_copy || get_node_type(*node) == node_fill) ? success : invalid_value;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuGraphInstantiateWithFlags(Handle* executable, Handle graph, unsigned long long flags) {
    return run_entry_with_graph_lock("cuGraphInstantiateWithFlags",
                                     [&] { return instantiate_graph(executable, graph, flags); });
}

// The last two parameters are a buffer for a log, which the twin does not write.
GDRKIT_CUDA_ENTRY Result cuGraphInstantiate_v2(Handle* executable, Handle graph, Handle* error_node, char*,
                                               std::size_t) {
    return run_entry_with_graph_lock("cuGraphInstantiate_v2", [&] {
        if (error_node != nullptr) {
            *error_node = 0;
        }
        return instantiate_graph(executable, graph, 0);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphInstantiateWithParams(Handle* executable, Handle graph,
                                                      InstantiateParameters* parameters) {
    return run_entry_with_graph_lock("cuGraphInstantiateWithParams", [&] {
        if (parameters == nullptr) {
            return invalid_value;
        }
        const Result result = instantiate_graph(executable, graph, parameters->flags);
        const GraphRef source_graph = find_graph(graph);
        const bool has_invalid_structure = result != success && source_graph && has_cycle(*source_graph);
        // The twin does not search for a node of the cycle. It reports the first node of the graph.
        parameters->error_node = has_invalid_structure ? source_graph->nodes.front()->handle : 0;
        parameters->result = result == success       ? instantiate_success
                             : has_invalid_structure ? instantiate_invalid_structure
                                                     : instantiate_error;
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecDestroy(Handle executable) {
    return run_entry_with_graph_lock("cuGraphExecDestroy",
                                     [&] { return executables().take(executable) ? success : invalid_value; });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecGetFlags(Handle executable_handle, std::uint64_t* flags) {
    return run_entry_with_graph_lock("cuGraphExecGetFlags", [&] {
        const ExecutableRef executable = executables().find(executable_handle);
        if (!executable || flags == nullptr) {
            return invalid_value;
        }
        *flags = executable->flags;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphLaunch(Handle executable, Handle stream) {
    // launch_graph() needs the current context, so run_entry_with_graph_lock() cannot be used here.
    return run_entry_in_context("cuGraphLaunch", [&](const ContextRef& context) {
        std::lock_guard lock(graph_mutex());
        return launch_graph(context, executable, stream);
    });
}

// The twin has nothing to upload, so the function only checks its arguments.
GDRKIT_CUDA_ENTRY Result cuGraphUpload(Handle executable, Handle stream_handle) {
    return run_entry_in_context("cuGraphUpload", [&](const ContextRef& context) {
        StreamRef stream;
        const Result result = find_stream(stream_handle, context, &stream);
        return result != success ? result : executables().find(executable) ? success : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecUpdate_v2(Handle executable, Handle graph, UpdateInformation* information) {
    return run_entry_with_graph_lock("cuGraphExecUpdate_v2", [&] {
        return information == nullptr ? invalid_value : update_graph(executable, graph, information);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecUpdate(Handle executable, Handle graph, Handle* error_node, int* update_result) {
    return run_entry_with_graph_lock("cuGraphExecUpdate", [&] {
        UpdateInformation information{};
        if (error_node == nullptr || update_result == nullptr) {
            return invalid_value;
        }
        const Result result = update_graph(executable, graph, &information);
        *error_node = information.error_node;
        *update_result = information.result;
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecMemcpyNodeSetParams(Handle executable, Handle node, const Copy3d* copy,
                                                        Handle context) {
    return run_entry_with_graph_lock("cuGraphExecMemcpyNodeSetParams", [&] {
        return copy == nullptr ? invalid_value : set_parameters(executable, node, CopyNode{*copy, context});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecMemsetNodeSetParams(Handle executable, Handle node, const FillParameters* fill,
                                                        Handle context) {
    return run_entry_with_graph_lock("cuGraphExecMemsetNodeSetParams", [&] {
        return fill == nullptr ? invalid_value : set_parameters(executable, node, FillNode{*fill, context});
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecHostNodeSetParams(Handle executable, Handle node, const HostParameters* host) {
    return run_entry_with_graph_lock("cuGraphExecHostNodeSetParams", [&] {
        return host == nullptr ? invalid_value : set_parameters(executable, node, *host);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecEventRecordNodeSetEvent(Handle executable, Handle node, Handle event) {
    return run_entry_with_graph_lock("cuGraphExecEventRecordNodeSetEvent",
                                     [&] { return set_parameters(executable, node, RecordNode{event}); });
}

GDRKIT_CUDA_ENTRY Result cuGraphExecEventWaitNodeSetEvent(Handle executable, Handle node, Handle event) {
    return run_entry_with_graph_lock("cuGraphExecEventWaitNodeSetEvent",
                                     [&] { return set_parameters(executable, node, WaitNode{event}); });
}

GDRKIT_CUDA_ENTRY Result cuGraphNodeSetEnabled(Handle executable_handle, Handle node, unsigned is_enabled) {
    return run_entry_with_graph_lock("cuGraphNodeSetEnabled", [&] {
        ExecutableRef executable;
        const Result result = find_executable_with_disableable_node(executable_handle, node, &executable);
        if (result == success) {
            std::erase(executable->disabled_nodes, node);
            if (is_enabled == 0) {
                executable->disabled_nodes.push_back(node);
            }
        }
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphNodeGetEnabled(Handle executable_handle, Handle node, unsigned* is_enabled) {
    return run_entry_with_graph_lock("cuGraphNodeGetEnabled", [&] {
        ExecutableRef executable;
        const Result result = is_enabled == nullptr
                                  ? invalid_value
                                  : find_executable_with_disableable_node(executable_handle, node, &executable);
        if (result == success) {
            *is_enabled = std::ranges::count(executable->disabled_nodes, node) == 0 ? 1 : 0;
        }
        return result;
    });
}

} // namespace gdrkit::twin::cuda
