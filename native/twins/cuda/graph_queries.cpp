// Functions that query and change the structure of graphs: nodes, dependencies and edges.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "cuda/graph.hpp"

namespace gdrkit::twin::cuda {
namespace {

// An edge: the second node depends on the first node.
using Edge = std::pair<NodeRef, NodeRef>;

bool depends_on(const Node& node, const NodeRef& other_node) {
    return std::ranges::find(node.dependencies, other_node) != node.dependencies.end();
}

// Store the handles of nodes, and 0 in the unused elements. `*count` is the number of elements of `handles`, and
// becomes the number of stored nodes. If `handles` is null, store only the number of all nodes in `*count`. If
// `edge_data` is not null, also store the default data of the edge of each node.
Result store_nodes(const std::vector<NodeRef>& nodes, Handle* handles, EdgeData* edge_data, std::size_t* count) {
    if (count == nullptr || (edge_data != nullptr && handles == nullptr)) {
        return invalid_value;
    }
    if (handles != nullptr) {
        for (std::size_t index = 0; index < *count; ++index) {
            handles[index] = index < nodes.size() ? nodes[index]->handle : 0;
        }
        *count = std::min(*count, nodes.size());
        if (edge_data != nullptr) {
            std::fill_n(edge_data, *count, EdgeData{});
        }
    } else {
        *count = nodes.size();
    }
    return success;
}

std::vector<NodeRef> list_dependents(const NodeRef& node) {
    std::vector<NodeRef> dependents;
    const GraphRef graph = node->graph.lock();
    std::ranges::copy_if(graph->nodes, std::back_inserter(dependents),
                         [&](const NodeRef& other_node) { return depends_on(*other_node, node); });
    return dependents;
}

// Store the handles of the two nodes of each edge. `*count` has the same meaning as in store_nodes().
Result store_edges(const Graph& graph, Handle* from, Handle* to, EdgeData* edge_data, std::size_t* count) {
    std::vector<NodeRef> sources, targets;
    for (const NodeRef& node : graph.nodes) {
        for (const NodeRef& dependency : node->dependencies) {
            sources.push_back(dependency);
            targets.push_back(node);
        }
    }
    if (count == nullptr || (from == nullptr) != (to == nullptr) || (edge_data != nullptr && from == nullptr)) {
        return invalid_value;
    }
    // Each call of store_nodes() changes its count, so the first call gets a copy.
    std::size_t target_count = *count;
    store_nodes(targets, to, nullptr, &target_count);
    // Like the driver of an H200, also store default data in the unused elements.
    if (edge_data != nullptr) {
        std::fill_n(edge_data, *count, EdgeData{});
    }
    return store_nodes(sources, from, nullptr, count);
}

// Find the graph and the nodes of edges. Fail if the two nodes of an edge are the same, or if a node does not belong to
// the graph.
Result find_edges(Handle graph_handle, const Handle* from, const Handle* to, std::size_t edge_count, GraphRef* graph,
                  std::vector<Edge>* edges) {
    *graph = find_graph(graph_handle);
    if (!*graph || (edge_count != 0 && (from == nullptr || to == nullptr))) {
        return invalid_value;
    }
    for (std::size_t index = 0; index < edge_count; ++index) {
        Edge edge{find_node(from[index]), find_node(to[index])};
        if (!edge.first || !edge.second || edge.first == edge.second || edge.first->graph.lock() != *graph ||
            edge.second->graph.lock() != *graph) {
            return invalid_value;
        }
        edges->push_back(std::move(edge));
    }
    return success;
}

Result add_dependencies(Handle graph_handle, const Handle* from, const Handle* to, std::size_t edge_count) {
    GraphRef graph;
    std::vector<Edge> edges;
    if (const Result result = find_edges(graph_handle, from, to, edge_count, &graph, &edges); result != success) {
        return result;
    }
    if (std::ranges::any_of(edges, [](const Edge& edge) { return depends_on(*edge.second, edge.first); })) {
        return invalid_value;
    }
    for (const auto& [source, target] : edges) {
        target->dependencies.push_back(source);
    }
    return success;
}

Result remove_dependencies(Handle graph_handle, const Handle* from, const Handle* to, std::size_t edge_count) {
    GraphRef graph;
    std::vector<Edge> edges;
    if (const Result result = find_edges(graph_handle, from, to, edge_count, &graph, &edges); result != success) {
        return result;
    }
    if (has_memory_nodes(*graph) ||
        !std::ranges::all_of(edges, [](const Edge& edge) { return depends_on(*edge.second, edge.first); })) {
        return invalid_value;
    }
    for (const auto& [source, target] : edges) {
        std::erase(target->dependencies, source);
    }
    return success;
}

// Write the graph in the DOT language of Graphviz.
Result print_dot(const Graph& graph, const char* path) {
    std::FILE* const file = std::fopen(path, "w");
    if (file == nullptr) {
        return operating_system_error;
    }
    std::fprintf(file, "digraph dot {\n");
    for (const NodeRef& node : graph.nodes) {
        std::fprintf(file, "\"node_%llx\" [label=\"type %d\"];\n", static_cast<unsigned long long>(node->handle),
                     static_cast<int>(get_node_type(*node)));
        for (const NodeRef& dependency : node->dependencies) {
            std::fprintf(file, "\"node_%llx\" -> \"node_%llx\";\n", static_cast<unsigned long long>(dependency->handle),
                         static_cast<unsigned long long>(node->handle));
        }
    }
    std::fprintf(file, "}\n");
    return std::fclose(file) == 0 ? success : operating_system_error;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuGraphNodeGetType(Handle handle, int* type) {
    return run_with_node("cuGraphNodeGetType", handle, [&](const NodeRef& node) {
        if (type == nullptr) {
            return invalid_value;
        }
        *type = get_node_type(*node);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphGetNodes(Handle handle, Handle* nodes, std::size_t* count) {
    return run_with_graph("cuGraphGetNodes", handle,
                          [&](const GraphRef& graph) { return store_nodes(graph->nodes, nodes, nullptr, count); });
}

GDRKIT_CUDA_ENTRY Result cuGraphGetRootNodes(Handle handle, Handle* nodes, std::size_t* count) {
    return run_with_graph("cuGraphGetRootNodes", handle, [&](const GraphRef& graph) {
        std::vector<NodeRef> root_nodes;
        std::ranges::copy_if(graph->nodes, std::back_inserter(root_nodes),
                             [](const NodeRef& node) { return node->dependencies.empty(); });
        return store_nodes(root_nodes, nodes, nullptr, count);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphGetEdges(Handle handle, Handle* from, Handle* to, std::size_t* count) {
    return run_with_graph("cuGraphGetEdges", handle,
                          [&](const GraphRef& graph) { return store_edges(*graph, from, to, nullptr, count); });
}

GDRKIT_CUDA_ENTRY Result cuGraphGetEdges_v2(Handle handle, Handle* from, Handle* to, EdgeData* edge_data,
                                            std::size_t* count) {
    return run_with_graph("cuGraphGetEdges_v2", handle,
                          [&](const GraphRef& graph) { return store_edges(*graph, from, to, edge_data, count); });
}

GDRKIT_CUDA_ENTRY Result cuGraphNodeGetDependencies(Handle handle, Handle* nodes, std::size_t* count) {
    return run_with_node("cuGraphNodeGetDependencies", handle,
                         [&](const NodeRef& node) { return store_nodes(node->dependencies, nodes, nullptr, count); });
}

GDRKIT_CUDA_ENTRY Result cuGraphNodeGetDependencies_v2(Handle handle, Handle* nodes, EdgeData* edge_data,
                                                       std::size_t* count) {
    return run_with_node("cuGraphNodeGetDependencies_v2", handle,
                         [&](const NodeRef& node) { return store_nodes(node->dependencies, nodes, edge_data, count); });
}

GDRKIT_CUDA_ENTRY Result cuGraphNodeGetDependentNodes(Handle handle, Handle* nodes, std::size_t* count) {
    return run_with_node("cuGraphNodeGetDependentNodes", handle, [&](const NodeRef& node) {
        return store_nodes(list_dependents(node), nodes, nullptr, count);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphNodeGetDependentNodes_v2(Handle handle, Handle* nodes, EdgeData* edge_data,
                                                         std::size_t* count) {
    return run_with_node("cuGraphNodeGetDependentNodes_v2", handle, [&](const NodeRef& node) {
        return store_nodes(list_dependents(node), nodes, edge_data, count);
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddDependencies(Handle graph, const Handle* from, const Handle* to,
                                                std::size_t edge_count) {
    return run_entry_with_graph_lock("cuGraphAddDependencies",
                                     [&] { return add_dependencies(graph, from, to, edge_count); });
}

GDRKIT_CUDA_ENTRY Result cuGraphAddDependencies_v2(Handle graph, const Handle* from, const Handle* to,
                                                   const EdgeData* edge_data, std::size_t edge_count) {
    return run_entry_with_graph_lock("cuGraphAddDependencies_v2", [&] {
        return is_default_edge_data(edge_data, edge_count) ? add_dependencies(graph, from, to, edge_count)
                                                           : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphRemoveDependencies(Handle graph, const Handle* from, const Handle* to,
                                                   std::size_t edge_count) {
    return run_entry_with_graph_lock("cuGraphRemoveDependencies",
                                     [&] { return remove_dependencies(graph, from, to, edge_count); });
}

GDRKIT_CUDA_ENTRY Result cuGraphRemoveDependencies_v2(Handle graph, const Handle* from, const Handle* to,
                                                      const EdgeData* edge_data, std::size_t edge_count) {
    return run_entry_with_graph_lock("cuGraphRemoveDependencies_v2", [&] {
        return is_default_edge_data(edge_data, edge_count) ? remove_dependencies(graph, from, to, edge_count)
                                                           : invalid_value;
    });
}

GDRKIT_CUDA_ENTRY Result cuGraphDebugDotPrint(Handle handle, const char* path, unsigned) {
    return run_with_graph("cuGraphDebugDotPrint", handle, [&](const GraphRef& graph) {
        return path == nullptr ? invalid_value : print_dot(*graph, path);
    });
}

} // namespace gdrkit::twin::cuda
