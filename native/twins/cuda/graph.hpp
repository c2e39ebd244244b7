// Graphs of work: nodes with dependencies. graph.cpp has the structure of graphs, graph_nodes.cpp the parameters of
// nodes, graph_exec.cpp executable graphs, and capture.cpp the capture of streams into graphs.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <variant>
#include <vector>

#include "cuda/entry.hpp"
#include "cuda/graph_abi.hpp"
#include "cuda/pool.hpp"

namespace gdrkit::twin::cuda {

// The memory of an allocation node. The address stays reserved for the node. A range exists at this address only
// while the memory is allocated. GraphMemory is a Pool, because get_pool_access() reads the access flags of a range of
// MemoryKind::pool from a Pool.
struct GraphMemory : Pool {
    GraphMemory() = default;
    GraphMemory(const GraphMemory&) = delete;
    GraphMemory& operator=(const GraphMemory&) = delete;
    ~GraphMemory();
    AddressSlot slot;
    std::uint64_t length_bytes = 0;
};

struct Graph;
using GraphRef = std::shared_ptr<Graph>;

struct EmptyNode {};
struct CopyNode {
    Copy3d copy{};
    Handle context = 0;
};
struct FillNode {
    FillParameters fill{};
    Handle context = 0;
};
struct ChildNode {
    GraphRef graph;
};
struct RecordNode {
    Handle event = 0;
};
struct WaitNode {
    Handle event = 0;
};
struct AllocateNode {
    AllocateParameters parameters{};
    std::shared_ptr<GraphMemory> memory;
};
struct FreeNode {
    DevicePointer pointer = 0;
};

// The condition of a conditional node.
struct Condition {
    std::weak_ptr<Context> context;
    unsigned value_at_launch = 0;
    bool is_used = false; // a conditional node uses the condition
};
using ConditionRef = std::shared_ptr<Condition>;

struct ConditionalNode {
    ConditionRef condition;
    int type = 0;
    std::vector<GraphRef> bodies;
    std::shared_ptr<std::vector<Handle>> body_handles; // the program has a pointer to these handles
};
using NodeParameters = std::variant<EmptyNode, CopyNode, FillNode, HostParameters, ChildNode, RecordNode, WaitNode,
                                    AllocateNode, FreeNode, ConditionalNode>;

struct Node {
    Handle handle = 0;
    std::weak_ptr<Graph> graph;
    NodeParameters parameters;
    std::vector<std::shared_ptr<Node>> dependencies;
    Handle original_handle = 0; // the node of which this node of a cloned graph is a copy, or 0
};
using NodeRef = std::shared_ptr<Node>;

// A resource of the program. When the last reference to it is dropped, the twin calls `destroy` with `pointer`.
struct UserObject {
    UserObject(void (*destroy_function)(void*), void* argument) : destroy(destroy_function), pointer(argument) {}
    UserObject(const UserObject&) = delete;
    UserObject& operator=(const UserObject&) = delete;
    ~UserObject();
    void (*destroy)(void*);
    void* pointer;
};

// A user object to which a graph refers, and how many references the program has given to the graph.
struct GraphObject {
    std::shared_ptr<UserObject> object;
    unsigned reference_count = 0;
};

struct Graph {
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph();
    Handle handle = 0;
    std::vector<NodeRef> nodes; // in the order in which they were added
    std::map<Handle, GraphObject> user_objects;
    std::map<Handle, ConditionRef> conditions; // created by the program for nodes of this graph
    std::weak_ptr<Graph> parent;               // the graph whose conditional node runs this graph, if there is one
    bool is_child = false;                     // a node owns the graph
    bool is_capturing = false;                 // a capture adds nodes
    std::weak_ptr<void> live_executable;       // the only executable graph of a graph that allocates or frees memory
};

// Return the mutex that guards all graphs, executable graphs and captures. A thread that holds this mutex may
// lock other mutexes of the twin. The mutex is recursive, because a thread that holds the mutex may drop the last
// reference to a graph, and ~Graph() locks the mutex.
std::recursive_mutex& graph_mutex();

// The following functions require graph_mutex().

GraphRef make_graph();
// Add a graph that the program owns and must destroy.
void add_owned_graph(const GraphRef& graph);
// Add the memory to the set that is_graph_memory() and count_graph_memory_bytes() search. ~GraphMemory() removes it.
void register_graph_memory(const GraphMemory* memory);
GraphRef find_graph(Handle handle);
NodeRef find_node(Handle handle);
NodeType get_node_type(const Node& node);
bool has_memory_nodes(const Graph& graph);
// Return whether the graph has memory or conditional nodes, so that the program may not copy it.
bool has_uncopyable_nodes(const Graph& graph);

// Find nodes of a graph by their handles. Fail with invalid_value if a node does not belong to the graph or
// is listed twice.
Result find_nodes(const Graph& graph, const Handle* handles, std::size_t count, std::vector<NodeRef>* nodes);

// Return whether all edges have default data, the only data that the node types of the twin allow. A null pointer
// stands for default data.
bool is_default_edge_data(const EdgeData* edge_data, std::size_t edge_count);

NodeRef add_node(const GraphRef& graph, NodeParameters parameters, std::vector<NodeRef> dependencies);

// Return a copy of a graph, with copies of its child graphs and of the graphs of its conditional nodes.
GraphRef clone_graph(const Graph& graph);

// Check the parameters of a new node. Its memory must exist or belong to an allocation node, and its event must exist.
Result check_parameters(const NodeParameters& parameters);

// Reserve an address for an allocation node and store it in the parameters. Fail if the parameters are invalid.
Result make_allocation(AllocateParameters* parameters, AllocateNode* node);

// Return whether this address lies in the memory of any allocation node.
bool is_graph_memory(DevicePointer address);
// Return the number of bytes that graphs have allocated on a device and not freed. record_graph_memory_use() raises
// each high-water mark of the device to this number if the mark is lower.
std::uint64_t count_graph_memory_bytes(Device device);
void record_graph_memory_use(Device device);

// Run the body of an exported function while this thread holds graph_mutex().
template <typename Body> Result run_entry_with_graph_lock(std::string_view symbol, Body&& body) {
    return run_entry(symbol, [&] {
        std::lock_guard lock(graph_mutex());
        return body();
    });
}

// Run `body` with the graph or the node of a handle, or fail with invalid_value if the handle is unknown.
template <typename Body> Result run_with_graph(std::string_view symbol, Handle handle, Body&& body) {
    return run_entry_with_graph_lock(symbol, [&] {
        const GraphRef graph = find_graph(handle);
        return graph ? body(graph) : invalid_value;
    });
}

template <typename Body> Result run_with_node(std::string_view symbol, Handle handle, Body&& body) {
    return run_entry_with_graph_lock(symbol, [&] {
        const NodeRef node = find_node(handle);
        return node ? body(node) : invalid_value;
    });
}

} // namespace gdrkit::twin::cuda
