// All graphs and their nodes, and functions that create, clone and destroy them.
#include "cuda/graph.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "cuda/registry.hpp"

namespace gdrkit::twin::cuda {
namespace {

struct Graphs {
    std::recursive_mutex mutex;
    Registry<Graph> owned_graphs{"cuda_graph"}; // the graphs that the program destroys
    std::map<Handle, std::weak_ptr<Graph>> graphs_by_handle;
    std::map<Handle, std::weak_ptr<Node>> nodes_by_handle;
    // This mutex guards `registered_memory`. It is separate, because a thread without `mutex` may drop the last
    // reference to a GraphMemory.
    std::mutex memory_mutex;
    std::set<const GraphMemory*> registered_memory;
};

Graphs& graphs() {
    static auto* const instance = new Graphs;
    return *instance;
}

Result destroy_node(Handle handle) {
    const NodeRef node = find_node(handle);
    const GraphRef graph = node ? node->graph.lock() : nullptr;
    if (!graph || graph->is_capturing || has_memory_nodes(*graph)) {
        return invalid_value;
    }
    for (const NodeRef& other_node : graph->nodes) {
        std::erase(other_node->dependencies, node);
    }
    std::erase(graph->nodes, node);
    graphs().nodes_by_handle.erase(handle);
    return success;
}

} // namespace

std::recursive_mutex& graph_mutex() {
    return graphs().mutex;
}

Graph::~Graph() {
    std::lock_guard lock(graph_mutex());
    graphs().graphs_by_handle.erase(handle);
    for (const NodeRef& node : nodes) {
        graphs().nodes_by_handle.erase(node->handle);
        // In a cycle of dependencies, the nodes would otherwise keep each other alive.
        node->dependencies.clear();
    }
}

GraphMemory::~GraphMemory() {
    {
        std::lock_guard lock(graphs().memory_mutex);
        graphs().registered_memory.erase(this);
    }
    free_address_slot(slot);
}

GraphRef make_graph() {
    auto graph = std::make_shared<Graph>();
    graph->handle = make_handle();
    graphs().graphs_by_handle[graph->handle] = graph;
    return graph;
}

void add_owned_graph(const GraphRef& graph) {
    graphs().owned_graphs.add(graph->handle, graph);
}

void register_graph_memory(const GraphMemory* memory) {
    std::lock_guard lock(graphs().memory_mutex);
    graphs().registered_memory.insert(memory);
}

GraphRef find_graph(Handle handle) {
    const auto entry = graphs().graphs_by_handle.find(handle);
    return entry == graphs().graphs_by_handle.end() ? nullptr : entry->second.lock();
}

NodeRef find_node(Handle handle) {
    const auto entry = graphs().nodes_by_handle.find(handle);
    return entry == graphs().nodes_by_handle.end() ? nullptr : entry->second.lock();
}

bool is_graph_memory(DevicePointer address) {
    std::lock_guard lock(graphs().memory_mutex);
    return std::ranges::any_of(graphs().registered_memory, [=](const GraphMemory* memory) {
        return address - memory->slot.base < memory->length_bytes;
    });
}

std::uint64_t count_graph_memory_bytes(Device device) {
    std::lock_guard lock(graphs().memory_mutex);
    std::uint64_t allocated_bytes = 0;
    for (const GraphMemory* memory : graphs().registered_memory) {
        if (memory->device == device && find_range_by_base(memory->slot.base)) {
            allocated_bytes += memory->length_bytes;
        }
    }
    return allocated_bytes;
}

NodeType get_node_type(const Node& node) {
    constexpr NodeType types_by_index[] = {node_empty, node_copy,         node_fill,       node_host,
                                           node_graph, node_record_event, node_wait_event, node_allocate,
                                           node_free,  node_conditional};
    static_assert(std::size(types_by_index) == std::variant_size_v<NodeParameters>);
    return types_by_index[node.parameters.index()];
}

bool has_memory_nodes(const Graph& graph) {
    return std::ranges::any_of(graph.nodes, [](const NodeRef& node) {
        return get_node_type(*node) == node_allocate || get_node_type(*node) == node_free;
    });
}

bool has_uncopyable_nodes(const Graph& graph) {
    return has_memory_nodes(graph) || std::ranges::any_of(graph.nodes, [](const NodeRef& node) {
               return get_node_type(*node) == node_conditional;
           });
}

Result find_nodes(const Graph& graph, const Handle* handles, std::size_t count, std::vector<NodeRef>* nodes) {
    if (count != 0 && handles == nullptr) {
        return invalid_value;
    }
    for (const Handle handle : std::span(handles, count)) {
        NodeRef node = find_node(handle);
        if (!node || node->graph.lock().get() != &graph || std::ranges::find(*nodes, node) != nodes->end()) {
            return invalid_value;
        }
        nodes->push_back(std::move(node));
    }
    return success;
}

bool is_default_edge_data(const EdgeData* edge_data, std::size_t edge_count) {
    return edge_data == nullptr || std::all_of(edge_data, edge_data + edge_count, [](const EdgeData& edge) {
               constexpr EdgeData default_edge{};
               return std::memcmp(&edge, &default_edge, sizeof edge) == 0;
           });
}

NodeRef add_node(const GraphRef& graph, NodeParameters parameters, std::vector<NodeRef> dependencies) {
    auto node = std::make_shared<Node>();
    node->handle = make_handle();
    node->graph = graph;
    node->parameters = std::move(parameters);
    node->dependencies = std::move(dependencies);
    graphs().nodes_by_handle[node->handle] = node;
    graph->nodes.push_back(node);
    return node;
}

GraphRef clone_graph(const Graph& graph) {
    GraphRef clone = make_graph();
    clone->user_objects = graph.user_objects;
    std::map<NodeRef, NodeRef> copy_of_node;
    for (const NodeRef& node : graph.nodes) {
        NodeParameters parameters = node->parameters;
        if (const auto* const child = std::get_if<ChildNode>(&parameters)) {
            GraphRef copy = clone_graph(*child->graph);
            copy->is_child = true;
            parameters = ChildNode{std::move(copy)};
        }
        if (auto* const conditional = std::get_if<ConditionalNode>(&parameters)) {
            for (GraphRef& body : conditional->bodies) {
                body = clone_graph(*body);
            }
        }
        copy_of_node[node] = add_node(clone, std::move(parameters), {});
        copy_of_node[node]->original_handle = node->handle;
    }
    for (const NodeRef& node : graph.nodes) {
        for (const NodeRef& dependency : node->dependencies) {
            copy_of_node[node]->dependencies.push_back(copy_of_node[dependency]);
        }
    }
    return clone;
}

GDRKIT_CUDA_ENTRY Result cuGraphCreate(Handle* handle, unsigned flags) {
    return run_entry_with_graph_lock("cuGraphCreate", [&] {
        if (handle == nullptr || flags != 0) {
            return invalid_value;
        }
        const GraphRef graph = make_graph();
        add_owned_graph(graph);
        *handle = graph->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphDestroy(Handle handle) {
    return run_entry_with_graph_lock("cuGraphDestroy", [&] {
        const GraphRef graph = find_graph(handle);
        if (graph && (graph->is_child || graph->is_capturing)) {
            return invalid_value;
        }
        return graphs().owned_graphs.take(handle) ? success : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphClone(Handle* clone, Handle original) {
    return run_with_graph("cuGraphClone", original, [&](const GraphRef& graph) {
        if (clone == nullptr || has_uncopyable_nodes(*graph)) {
            return invalid_value;
        }
        const GraphRef cloned_graph = clone_graph(*graph);
        add_owned_graph(cloned_graph);
        *clone = cloned_graph->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphNodeFindInClone(Handle* node, Handle original, Handle clone) {
    return run_with_graph("cuGraphNodeFindInClone", clone, [&](const GraphRef& graph) {
        const auto entry =
            std::ranges::find(graph->nodes, original, [](const NodeRef& copy) { return copy->original_handle; });
        if (node == nullptr || original == 0 || entry == graph->nodes.end()) {
            return invalid_value;
        }
        *node = (*entry)->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphDestroyNode(Handle node) {
    return run_entry_with_graph_lock("cuGraphDestroyNode", [&] { return destroy_node(node); });
}

} // namespace gdrkit::twin::cuda
