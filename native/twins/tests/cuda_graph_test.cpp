// Tests of the software twin of libcuda: CUDA graphs with their nodes and dependencies, executable graphs and launches.
#include <algorithm>
#include <atomic>

#include "cuda/graph_abi.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr u64 buffer_bytes = 1000;
const Handle* const no_nodes = nullptr;

Handle create_graph() {
    Handle graph = 0;
    EXPECT_SUCCESS("cuGraphCreate", &graph, 0U);
    return graph;
}

Handle create_stream() {
    Handle stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, unsigned{stream_non_blocking});
    return stream;
}

Copy3d describe_copy(u64 to_address, u64 from_address) {
    Copy3d copy{};
    copy.to.memory_type = copy.from.memory_type = memory_unified;
    copy.to.device = to_address;
    copy.from.device = from_address;
    copy.width_bytes = buffer_bytes;
    copy.height = copy.depth = 1;
    return copy;
}

Handle add_copy(Handle graph, const std::vector<Handle>& dependencies, u64 to_address, u64 from_address) {
    Handle node = 0;
    const Copy3d copy = describe_copy(to_address, from_address);
    EXPECT_SUCCESS("cuGraphAddMemcpyNode", &node, graph, dependencies.data(), u64{dependencies.size()}, &copy,
                   Handle{0});
    return node;
}

Handle add_fill(Handle graph, const std::vector<Handle>& dependencies, u64 to_address, unsigned value) {
    Handle node = 0;
    // The members are the address, pitch, value and element size in bytes, and the width and height.
    const FillParameters fill{to_address, 0, value, 1, buffer_bytes, 1};
    EXPECT_SUCCESS("cuGraphAddMemsetNode", &node, graph, dependencies.data(), u64{dependencies.size()}, &fill,
                   Handle{0});
    return node;
}

Handle instantiate_graph(Handle graph, u64 flags = 0) {
    Handle executable = 0;
    EXPECT_SUCCESS("cuGraphInstantiateWithFlags", &executable, graph, flags);
    return executable;
}

void launch_and_wait(Handle executable, Handle stream) {
    EXPECT_SUCCESS("cuGraphLaunch", executable, stream);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
}

int get_node_type(Handle node) {
    int type = -1;
    EXPECT_SUCCESS("cuGraphNodeGetType", node, &type);
    return type;
}

std::vector<Handle> list_nodes(const char* symbol, Handle graph_or_node) {
    u64 count = 0;
    EXPECT_SUCCESS(symbol, graph_or_node, static_cast<Handle*>(nullptr), &count);
    std::vector<Handle> nodes(count);
    EXPECT_SUCCESS(symbol, graph_or_node, nodes.data(), &count);
    return nodes;
}

// Each launch executes all nodes again, in the order of their dependencies.
void test_launch_follows_dependencies() {
    const Handle graph = create_graph(), stream = create_stream();
    const u64 first_memory = allocate(buffer_bytes), second_memory = allocate(buffer_bytes);
    static std::atomic<int> call_count{0};
    const HostParameters host_parameters{[](void* counter) { ++*static_cast<std::atomic<int>*>(counter); },
                                         &call_count};
    // The program adds the nodes in the reverse order of their dependencies.
    Handle host_node = 0;
    EXPECT_SUCCESS("cuGraphAddHostNode", &host_node, graph, no_nodes, u64{0}, &host_parameters);
    const Handle copy_node = add_copy(graph, {}, second_memory, first_memory),
                 fill_node = add_fill(graph, {}, first_memory, 7);
    const Handle from_nodes[] = {fill_node, copy_node}, to_nodes[] = {copy_node, host_node};
    EXPECT_SUCCESS("cuGraphAddDependencies", graph, static_cast<const Handle*>(from_nodes),
                   static_cast<const Handle*>(to_nodes), u64{2});
    const Handle executable = instantiate_graph(graph);
    CHECK(call_count == 0);
    for (int round = 1; round <= 20; ++round) {
        EXPECT_SUCCESS("cuMemsetD8_v2", first_memory, static_cast<unsigned char>(round), buffer_bytes);
        EXPECT_SUCCESS("cuMemsetD8_v2", second_memory, static_cast<unsigned char>(round), buffer_bytes);
        EXPECT_SUCCESS("cuCtxSynchronize");
        launch_and_wait(executable, stream);
        CHECK(read_device(second_memory, buffer_bytes) == std::vector<unsigned char>(buffer_bytes, 7) &&
              call_count == round);
    }
    CHECK((list_nodes("cuGraphGetNodes", graph) == std::vector{host_node, copy_node, fill_node}));
    CHECK(list_nodes("cuGraphGetRootNodes", graph) == std::vector{fill_node});
    CHECK(list_nodes("cuGraphNodeGetDependencies", copy_node) == std::vector{fill_node});
    CHECK(list_nodes("cuGraphNodeGetDependentNodes", copy_node) == std::vector{host_node});
    CHECK(get_node_type(copy_node) == node_copy && get_node_type(fill_node) == node_fill &&
          get_node_type(host_node) == node_host);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    launch_and_wait(executable, stream);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_RESULT(invalid_value, "cuGraphLaunch", executable, stream);
    EXPECT_SUCCESS("cuMemFree_v2", first_memory);
    EXPECT_SUCCESS("cuMemFree_v2", second_memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A change of a graph does not change the executable graph that was made from it. cuGraphExecUpdate_v2 applies the
// change.
void test_executable_graph_is_updated() {
    const Handle graph = create_graph(), stream = create_stream();
    const u64 memory = allocate(buffer_bytes);
    const Handle fill_node = add_fill(graph, {}, memory, 1), executable = instantiate_graph(graph);
    FillParameters fill_parameters{memory, 0, 2, 1, buffer_bytes, 1};
    EXPECT_SUCCESS("cuGraphMemsetNodeSetParams", fill_node, &fill_parameters);
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, 1)[0] == 1);
    UpdateInformation update_information{9, 9, 9};
    EXPECT_SUCCESS("cuGraphExecUpdate_v2", executable, graph, &update_information);
    CHECK(update_information.result == update_success && update_information.error_node == 0);
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, 1)[0] == 2);
    fill_parameters.value = 3;
    EXPECT_SUCCESS("cuGraphExecMemsetNodeSetParams", executable, fill_node, &fill_parameters, Handle{0});
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, 1)[0] == 3);
    // A disabled node does nothing.
    EXPECT_SUCCESS("cuGraphNodeSetEnabled", executable, fill_node, 0U);
    EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(0), buffer_bytes);
    EXPECT_SUCCESS("cuCtxSynchronize");
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, 1)[0] == 0);
    add_fill(graph, {fill_node}, memory, 4);
    EXPECT_RESULT(graph_update_failure, "cuGraphExecUpdate_v2", executable, graph, &update_information);
    CHECK(update_information.result == update_topology_changed);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_child_graph_and_clone_are_copies() {
    const Handle child_graph = create_graph(), graph = create_graph(), stream = create_stream();
    const u64 memory = allocate(buffer_bytes);
    const Handle fill_node = add_fill(child_graph, {}, memory, 5);
    Handle child_node = 0, embedded_graph = 0, cloned_graph = 0, fill_in_clone = 0;
    EXPECT_SUCCESS("cuGraphAddChildGraphNode", &child_node, graph, no_nodes, u64{0}, child_graph);
    EXPECT_SUCCESS("cuGraphChildGraphNodeGetGraph", child_node, &embedded_graph);
    CHECK(embedded_graph != child_graph && list_nodes("cuGraphGetNodes", embedded_graph).size() == 1);
    EXPECT_RESULT(invalid_value, "cuGraphDestroy", embedded_graph);
    EXPECT_SUCCESS("cuGraphClone", &cloned_graph, child_graph);
    EXPECT_SUCCESS("cuGraphNodeFindInClone", &fill_in_clone, fill_node, cloned_graph);
    CHECK(list_nodes("cuGraphGetNodes", cloned_graph) == std::vector{fill_in_clone});
    EXPECT_SUCCESS("cuGraphDestroy", child_graph);
    const Handle executable = instantiate_graph(graph);
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, buffer_bytes)[buffer_bytes - 1] == 5);
    for (const Handle graph_to_destroy : {graph, cloned_graph}) {
        EXPECT_SUCCESS("cuGraphDestroy", graph_to_destroy);
    }
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// The memory of an allocation node has the same address at each launch. It exists from the execution of its node to the
// execution of the node that frees it.
void test_memory_nodes_allocate_at_each_launch() {
    const Handle graph = create_graph(), stream = create_stream();
    const u64 free_bytes_before = query_free_memory(), result_memory = allocate(buffer_bytes);
    AllocateParameters allocation_parameters{};
    allocation_parameters.pool.allocation_type = allocation_pinned;
    allocation_parameters.pool.location = {location_device, 0};
    allocation_parameters.length_bytes = buffer_bytes;
    Handle allocation_node = 0, free_node = 0, unused_handle = 0;
    EXPECT_SUCCESS("cuGraphAddMemAllocNode", &allocation_node, graph, no_nodes, u64{0}, &allocation_parameters);
    const Handle fill_node = add_fill(graph, {allocation_node}, allocation_parameters.pointer, 6);
    const Handle copy_node = add_copy(graph, {fill_node}, result_memory, allocation_parameters.pointer);
    EXPECT_SUCCESS("cuGraphAddMemFreeNode", &free_node, graph, &copy_node, u64{1}, allocation_parameters.pointer);
    // A free node must name memory of an allocation node that no other node of the graph frees.
    EXPECT_RESULT(invalid_value, "cuGraphAddMemFreeNode", &unused_handle, graph, &copy_node, u64{1},
                  allocation_parameters.pointer);
    EXPECT_RESULT(invalid_value, "cuGraphAddMemFreeNode", &unused_handle, graph, &copy_node, u64{1}, result_memory);
    const Handle executable = instantiate_graph(graph);
    // A graph that allocates memory cannot have a second executable graph or a clone. Its memory exists only during a
    // launch.
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithFlags", &unused_handle, graph, u64{0});
    EXPECT_RESULT(invalid_value, "cuGraphClone", &unused_handle, graph);
    EXPECT_RESULT(invalid_value, "cuMemsetD8_v2", allocation_parameters.pointer, static_cast<unsigned char>(1), u64{1});
    for (int round = 0; round < 3; ++round) {
        EXPECT_SUCCESS("cuMemsetD8_v2", result_memory, static_cast<unsigned char>(0), buffer_bytes);
        EXPECT_SUCCESS("cuCtxSynchronize");
        launch_and_wait(executable, stream);
        CHECK(read_device(result_memory, buffer_bytes) == std::vector<unsigned char>(buffer_bytes, 6));
    }
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuMemFree_v2", result_memory);
    CHECK(wait_for_free_memory(free_bytes_before));
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// The used memory is the memory that graphs allocated and that was not freed. The high mark is its largest size since
// the program reset the mark, by setting it to 0.
void test_memory_of_graphs_is_counted() {
    const Handle graph = create_graph(), stream = create_stream();
    AllocateParameters allocation_parameters{};
    allocation_parameters.pool.allocation_type = allocation_pinned;
    allocation_parameters.pool.location = {location_device, 0};
    allocation_parameters.length_bytes = buffer_bytes;
    Handle allocation_node = 0;
    const auto query_attribute = [](int attribute) {
        u64 value = 9;
        EXPECT_SUCCESS("cuDeviceGetGraphMemAttribute", 0, attribute, &value);
        return value;
    };
    // The attributes are CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, USED_MEM_HIGH, RESERVED_MEM_CURRENT and RESERVED_MEM_HIGH.
    constexpr int used_attribute = 0, used_high_attribute = 1, reserved_attribute = 2, reserved_high_attribute = 3;
    u64 zero = 0;
    EXPECT_SUCCESS("cuDeviceSetGraphMemAttribute", 0, used_high_attribute, &zero);
    CHECK(query_attribute(used_attribute) == 0 && query_attribute(used_high_attribute) == 0);
    EXPECT_SUCCESS("cuGraphAddMemAllocNode", &allocation_node, graph, no_nodes, u64{0}, &allocation_parameters);
    const Handle executable = instantiate_graph(graph);
    CHECK(query_attribute(used_attribute) == 0);
    launch_and_wait(executable, stream);
    CHECK(query_attribute(used_attribute) == buffer_bytes && query_attribute(used_high_attribute) == buffer_bytes &&
          query_attribute(reserved_attribute) == buffer_bytes);
    EXPECT_SUCCESS("cuMemFree_v2", allocation_parameters.pointer);
    CHECK(query_attribute(used_attribute) == 0 && query_attribute(used_high_attribute) == buffer_bytes &&
          query_attribute(reserved_high_attribute) >= buffer_bytes);
    EXPECT_RESULT(invalid_value, "cuDeviceSetGraphMemAttribute", 0, used_attribute, &zero);
    EXPECT_SUCCESS("cuDeviceSetGraphMemAttribute", 0, used_high_attribute, &zero);
    CHECK(query_attribute(used_high_attribute) == 0);
    EXPECT_RESULT(invalid_value, "cuDeviceGetGraphMemAttribute", 0, 4, &zero); // 4 is not an attribute
    EXPECT_RESULT(invalid_device, "cuDeviceGetGraphMemAttribute", 99, used_attribute, &zero);
    EXPECT_SUCCESS("cuDeviceGraphMemTrim", 0);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// Memory that a graph allocates and does not free stays allocated until the program frees it, and until then another
// launch fails. With instantiate_auto_free, the next launch frees the memory.
void test_unfreed_memory_prevents_a_launch() {
    const Handle stream = create_stream();
    for (const u64 flags : {u64{0}, u64{instantiate_auto_free}}) {
        const Handle graph = create_graph();
        AllocateParameters allocation_parameters{};
        allocation_parameters.pool.allocation_type = allocation_pinned;
        allocation_parameters.pool.location = {location_device, 0};
        allocation_parameters.length_bytes = buffer_bytes;
        Handle allocation_node = 0;
        EXPECT_SUCCESS("cuGraphAddMemAllocNode", &allocation_node, graph, no_nodes, u64{0}, &allocation_parameters);
        add_fill(graph, {allocation_node}, allocation_parameters.pointer, 6);
        const Handle executable = instantiate_graph(graph, flags);
        launch_and_wait(executable, stream);
        CHECK(read_device(allocation_parameters.pointer, buffer_bytes)[1] == 6);
        EXPECT_RESULT(flags == 0 ? invalid_value : success, "cuGraphLaunch", executable, stream);
        EXPECT_SUCCESS("cuMemFreeAsync", allocation_parameters.pointer, stream);
        launch_and_wait(executable, stream);
        EXPECT_SUCCESS("cuMemFree_v2", allocation_parameters.pointer);
        EXPECT_SUCCESS("cuGraphExecDestroy", executable);
        EXPECT_SUCCESS("cuGraphDestroy", graph);
    }
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_event_nodes_record_and_wait() {
    const Handle graph = create_graph(), stream = create_stream();
    Handle event = 0, record_node = 0, wait_node = 0;
    EXPECT_SUCCESS("cuEventCreate", &event, 0U);
    const u64 memory = allocate(buffer_bytes);
    const Handle fill_node = add_fill(graph, {}, memory, 8);
    EXPECT_SUCCESS("cuGraphAddEventRecordNode", &record_node, graph, &fill_node, u64{1}, event);
    EXPECT_SUCCESS("cuGraphAddEventWaitNode", &wait_node, graph, no_nodes, u64{0}, event);
    const Handle executable = instantiate_graph(graph);
    for (int round = 0; round < 5; ++round) {
        EXPECT_SUCCESS("cuGraphLaunch", executable, stream);
        EXPECT_SUCCESS("cuEventSynchronize", event);
        CHECK(read_device(memory, buffer_bytes)[buffer_bytes - 1] == 8);
    }
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A user object lives as long as the program, a graph or an executable graph refers to it.
void test_user_object_lives_as_long_as_its_graphs() {
    static std::atomic<int> destroyed_count{0};
    const auto wait_until_destroyed = [](int expected_count) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (destroyed_count != expected_count && std::chrono::steady_clock::now() < deadline) {
            sched_yield();
        }
        return destroyed_count == expected_count;
    };
    const auto count_destruction = +[](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
    const Handle graph = create_graph();
    Handle graph_object = 0, program_object = 0;
    // The last two arguments are the number of references and the flags. The flag CU_USER_OBJECT_NO_DESTRUCTOR_SYNC (1)
    // is required, so the first call fails.
    EXPECT_RESULT(invalid_value, "cuUserObjectCreate", &graph_object, static_cast<void*>(&destroyed_count),
                  count_destruction, 1U, 0U);
    EXPECT_SUCCESS("cuUserObjectCreate", &graph_object, static_cast<void*>(&destroyed_count), count_destruction, 1U,
                   1U);
    EXPECT_SUCCESS("cuUserObjectCreate", &program_object, static_cast<void*>(&destroyed_count), count_destruction, 1U,
                   1U);
    EXPECT_SUCCESS("cuUserObjectRetain", program_object, 1U);
    // With CU_GRAPH_USER_OBJECT_MOVE (1), the graph takes the reference of the program.
    EXPECT_SUCCESS("cuGraphRetainUserObject", graph, graph_object, 1U, 1U);
    EXPECT_RESULT(invalid_value, "cuUserObjectRelease", graph_object, 1U);
    EXPECT_RESULT(invalid_value, "cuUserObjectRelease", program_object, 3U);
    EXPECT_SUCCESS("cuUserObjectRelease", program_object, 2U);
    CHECK(wait_until_destroyed(1));
    const Handle executable = instantiate_graph(graph);
    EXPECT_SUCCESS("cuGraphReleaseUserObject", graph, graph_object, 1U);
    EXPECT_RESULT(invalid_value, "cuGraphReleaseUserObject", graph, graph_object, 1U);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    CHECK(destroyed_count == 1);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    CHECK(wait_until_destroyed(2));
}

// Add a conditional node of the type `type` to a graph, store the body graphs of the node in `bodies`, and return the
// node.
Handle add_conditional(Handle graph, unsigned condition_value, int type, unsigned body_count,
                       std::vector<Handle>* bodies) {
    Handle condition = 0, node = 0;
    EXPECT_SUCCESS("cuGraphConditionalHandleCreate", &condition, graph, Handle{0}, condition_value,
                   condition_assign_default);
    NodeParameterUnion parameters{};
    parameters.type = node_conditional;
    parameters.conditional = {condition, type, body_count, nullptr, 0};
    EXPECT_SUCCESS("cuGraphAddNode_v2", &node, graph, no_nodes, static_cast<const EdgeData*>(nullptr), u64{0},
                   &parameters);
    CHECK(get_node_type(node) == node_conditional);
    bodies->assign(parameters.conditional.bodies, parameters.conditional.bodies + body_count);
    return node;
}

// The body graph with the index i fills the memory with i + 1, in a nested conditional node. Each row has the type of
// the node, the number of its body graphs, the value of the condition, and the index of the body graph that runs (-1:
// none).
void test_conditional_node_runs_one_graph() {
    struct Row {
        int type;
        unsigned body_count, condition_value;
        int running_body_index;
    };
    const Handle stream = create_stream();
    const u64 memory = allocate(buffer_bytes);
    for (const Row& row :
         {Row{conditional_if, 1, 0, -1}, Row{conditional_if, 1, 7, 0}, Row{conditional_if, 2, 0, 1},
          Row{conditional_if, 2, 1, 0}, Row{conditional_while, 1, 0, -1}, Row{conditional_switch, 3, 0, 0},
          Row{conditional_switch, 3, 2, 2}, Row{conditional_switch, 3, 3, -1}}) {
        const Handle graph = create_graph();
        std::vector<Handle> bodies, inner_bodies;
        add_conditional(graph, row.condition_value, row.type, row.body_count, &bodies);
        for (unsigned index = 0; index < row.body_count; ++index) {
            add_conditional(bodies[index], 1, conditional_if, 1, &inner_bodies);
            add_fill(inner_bodies[0], {}, memory, index + 1);
        }
        EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(0), buffer_bytes);
        EXPECT_SUCCESS("cuCtxSynchronize");
        const Handle executable = instantiate_graph(graph);
        launch_and_wait(executable, stream);
        CHECK(read_device(memory, buffer_bytes) ==
              std::vector<unsigned char>(buffer_bytes, static_cast<unsigned char>(row.running_body_index + 1)));
        EXPECT_RESULT(invalid_value, "cuGraphDestroy", bodies[0]);
        EXPECT_SUCCESS("cuGraphExecDestroy", executable);
        EXPECT_SUCCESS("cuGraphDestroy", graph);
        EXPECT_RESULT(invalid_value, "cuGraphDestroy", bodies[0]);
    }
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// An update can change the value of the condition and the parameters in the body graphs, but not the type of the node.
void test_conditional_node_is_updated() {
    const Handle graph = create_graph(), same_type_graph = create_graph(), other_type_graph = create_graph(),
                 stream = create_stream();
    const u64 memory = allocate(buffer_bytes);
    std::vector<Handle> bodies;
    add_conditional(graph, 0, conditional_if, 1, &bodies);
    add_fill(bodies[0], {}, memory, 1);
    const Handle executable = instantiate_graph(graph);
    UpdateInformation update_information{};
    add_conditional(other_type_graph, 0, conditional_switch, 1, &bodies);
    add_fill(bodies[0], {}, memory, 1);
    EXPECT_RESULT(graph_update_failure, "cuGraphExecUpdate_v2", executable, other_type_graph, &update_information);
    CHECK(update_information.result == update_parameters_changed);
    add_conditional(same_type_graph, 1, conditional_if, 1, &bodies);
    // The body graph is still empty, so its nodes differ from the nodes of the executable graph.
    EXPECT_RESULT(graph_update_failure, "cuGraphExecUpdate_v2", executable, same_type_graph, &update_information);
    add_fill(bodies[0], {}, memory, 2);
    EXPECT_SUCCESS("cuGraphExecUpdate_v2", executable, same_type_graph, &update_information);
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, buffer_bytes) == std::vector<unsigned char>(buffer_bytes, 2));
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    for (const Handle graph_to_destroy : {graph, same_type_graph, other_type_graph}) {
        EXPECT_SUCCESS("cuGraphDestroy", graph_to_destroy);
    }
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_wrong_conditional_nodes_are_refused() {
    const Handle graph = create_graph(), second_graph = create_graph(), stream = create_stream();
    Handle condition = 0, node = 0, unused_handle = 0;
    EXPECT_RESULT(invalid_value, "cuGraphConditionalHandleCreate", &condition, graph, Handle{0}, 0U,
                  2U); // 2 is not a flag
    EXPECT_RESULT(invalid_value, "cuGraphConditionalHandleCreate", &condition, Handle{5}, Handle{0}, 0U, 0U);
    EXPECT_SUCCESS("cuGraphConditionalHandleCreate", &condition, graph, Handle{0}, 1U, condition_assign_default);
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithFlags", &unused_handle, graph,
                  u64{0}); // the condition belongs to no node yet
    const auto add_conditional_node = [&](Handle target_graph, int type, unsigned body_count) {
        NodeParameterUnion parameters{};
        parameters.type = node_conditional;
        parameters.conditional = {condition, type, body_count, nullptr, 0};
        return call_driver("cuGraphAddNode", &node, target_graph, no_nodes, u64{0}, &parameters);
    };
    // A condition belongs to one graph and to one node. A node of the type IF has 1 or 2 body graphs, WHILE has 1, and
    // SWITCH has at least 1. 3 is not a type.
    CHECK(add_conditional_node(second_graph, conditional_if, 1) == invalid_value);
    CHECK(add_conditional_node(graph, conditional_if, 3) == invalid_value &&
          add_conditional_node(graph, conditional_while, 2) == invalid_value);
    CHECK(add_conditional_node(graph, conditional_switch, 0) == invalid_value &&
          add_conditional_node(graph, 3, 1) == invalid_value);
    CHECK(add_conditional_node(graph, conditional_while, 1) == success &&
          add_conditional_node(graph, conditional_while, 1) == invalid_value);
    EXPECT_RESULT(invalid_value, "cuGraphClone", &unused_handle, graph);
    EXPECT_RESULT(invalid_value, "cuGraphAddChildGraphNode", &unused_handle, second_graph, no_nodes, u64{0}, graph);
    const Handle executable = instantiate_graph(graph);
    EXPECT_RESULT(not_supported, "cuGraphLaunch", executable,
                  stream); // the twin runs no kernels, so nothing could end the loop
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    std::vector<Handle> bodies;
    add_conditional(second_graph, 0, conditional_if, 1, &bodies);
    const HostParameters host_parameters{[](void*) {}, nullptr};
    // A body graph with a host node cannot be instantiated.
    EXPECT_SUCCESS("cuGraphAddHostNode", &node, bodies[0], no_nodes, u64{0}, &host_parameters);
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithFlags", &unused_handle, second_graph, u64{0});
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuGraphDestroy", second_graph);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A launch fails if the program has freed memory that a node uses.
void test_launch_after_free_is_refused() {
    const Handle graph = create_graph(), stream = create_stream();
    const u64 memory = allocate(buffer_bytes);
    add_fill(graph, {}, memory, 1);
    const Handle executable = instantiate_graph(graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_RESULT(invalid_value, "cuGraphLaunch", executable, stream);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A query for edge data without the nodes fails and stores nothing. In a call with an array of nodes, `count` is first
// the capacity of the arrays, and then the number of edges. In a call without arrays, it is only a result. Like the
// driver of an H200, cuGraphGetEdges stores default data also in the unused elements of the array of edge data, and the
// other queries leave these elements unchanged.
void test_edge_data_is_stored_with_the_nodes() {
    const Handle graph = create_graph();
    Handle first_node = 0, second_node = 0;
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &first_node, graph, no_nodes, u64{0});
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &second_node, graph, &first_node, u64{1});
    const EdgeData untouched{9, 9, 9, {}};
    std::vector<EdgeData> edge_data(2, untouched);
    const auto has_untouched_edges = [&](std::size_t first_index) {
        return std::all_of(edge_data.begin() + static_cast<std::ptrdiff_t>(first_index), edge_data.end(),
                           [](const EdgeData& edge) { return edge.from_port == 9 && edge.type == 9; });
    };
    Handle from_nodes[2]{}, to_nodes[2]{};
    Handle* const from_pointer = from_nodes;
    Handle* const to_pointer = to_nodes;
    Handle* const no_handles = nullptr;
    u64 count = 1000;
    EXPECT_RESULT(invalid_value, "cuGraphGetEdges_v2", graph, no_handles, no_handles, edge_data.data(), &count);
    EXPECT_RESULT(invalid_value, "cuGraphNodeGetDependencies_v2", second_node, no_handles, edge_data.data(), &count);
    EXPECT_RESULT(invalid_value, "cuGraphNodeGetDependentNodes_v2", first_node, no_handles, edge_data.data(), &count);
    CHECK(count == 1000 && has_untouched_edges(0));
    count = 2;
    EXPECT_RESULT(invalid_value, "cuGraphGetEdges_v2", graph, from_pointer, no_handles, edge_data.data(), &count);
    EXPECT_RESULT(invalid_value, "cuGraphGetEdges_v2", graph, no_handles, to_pointer, edge_data.data(), &count);
    CHECK(count == 2 && has_untouched_edges(0));
    // Check the result of a query, and reset the arguments for the next query.
    const auto check_and_reset_edge = [&](Handle expected_node, bool clears_unused_element) {
        CHECK(count == 1 && from_nodes[0] == expected_node && from_nodes[1] == 0);
        CHECK(edge_data[0].from_port == 0 && edge_data[0].to_port == 0 && edge_data[0].type == 0);
        CHECK(clears_unused_element ? edge_data[1].type == 0 : has_untouched_edges(1));
        count = 2;
        edge_data.assign(2, untouched);
    };
    EXPECT_SUCCESS("cuGraphGetEdges_v2", graph, from_pointer, to_pointer, edge_data.data(), &count);
    CHECK(to_nodes[0] == second_node && to_nodes[1] == 0);
    check_and_reset_edge(first_node, true);
    EXPECT_SUCCESS("cuGraphNodeGetDependencies_v2", second_node, from_pointer, edge_data.data(), &count);
    check_and_reset_edge(first_node, false);
    EXPECT_SUCCESS("cuGraphNodeGetDependentNodes_v2", first_node, from_pointer, edge_data.data(), &count);
    check_and_reset_edge(second_node, false);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
}

void test_wrong_graphs_are_refused() {
    const Handle graph = create_graph(), second_graph = create_graph();
    Handle first_node = 0, second_node = 0, unused_handle = 0;
    EXPECT_RESULT(invalid_value, "cuGraphCreate", &unused_handle, 1U); // the flags must be 0
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &first_node, graph, no_nodes, u64{0});
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &second_node, graph, &first_node, u64{1});
    EXPECT_RESULT(invalid_value, "cuGraphAddEmptyNode", &unused_handle, second_graph, &first_node, u64{1});
    const Handle repeated_nodes[] = {first_node, first_node};
    EXPECT_RESULT(invalid_value, "cuGraphAddEmptyNode", &unused_handle, graph,
                  static_cast<const Handle*>(repeated_nodes), u64{2});
    EXPECT_RESULT(invalid_value, "cuGraphAddDependencies", graph, &first_node, &second_node, u64{1});
    EXPECT_RESULT(invalid_value, "cuGraphRemoveDependencies", graph, &second_node, &first_node, u64{1});
    // A graph with a cycle cannot be instantiated.
    EXPECT_SUCCESS("cuGraphAddDependencies", graph, &second_node, &first_node, u64{1});
    InstantiateParameters parameters{0, 0, 1, 9}; // flags, upload_stream, error_node and result
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithParams", &unused_handle, graph, &parameters);
    CHECK(parameters.result == instantiate_invalid_structure && parameters.error_node != 0);
    EXPECT_SUCCESS("cuGraphRemoveDependencies", graph, &second_node, &first_node, u64{1});
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithFlags", &unused_handle, graph,
                  u64{0x100}); // 0x100 is not a flag
    // The addresses of this copy are not device memory, and 5 is not a context.
    Copy3d copy = describe_copy(0x1000, 0x2000);
    copy.to.memory_type = memory_device;
    const Copy3d* const copy_pointer = &copy;
    EXPECT_RESULT(invalid_value, "cuGraphAddMemcpyNode", &unused_handle, graph, no_nodes, u64{0}, copy_pointer,
                  Handle{0});
    EXPECT_RESULT(invalid_context, "cuGraphAddMemcpyNode", &unused_handle, graph, no_nodes, u64{0}, copy_pointer,
                  Handle{5});
    const FillParameters fill{0x1000, 0, 0, 3, buffer_bytes, 1}; // an element has 1, 2 or 4 bytes, not 3
    EXPECT_RESULT(invalid_value, "cuGraphAddMemsetNode", &unused_handle, graph, no_nodes, u64{0}, &fill, Handle{0});
    EXPECT_SUCCESS("cuGraphDestroyNode", first_node);
    CHECK(list_nodes("cuGraphGetNodes", graph) == std::vector{second_node} &&
          list_nodes("cuGraphGetRootNodes", graph).size() == 1);
    EXPECT_RESULT(invalid_value, "cuGraphDestroyNode", first_node);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuGraphDestroy", second_graph);
    EXPECT_RESULT(invalid_value, "cuGraphAddEmptyNode", &unused_handle, graph, no_nodes, u64{0});
}

} // namespace

int main() {
    use_primary_context();
    test_launch_follows_dependencies();
    test_executable_graph_is_updated();
    test_child_graph_and_clone_are_copies();
    test_memory_nodes_allocate_at_each_launch();
    test_memory_of_graphs_is_counted();
    test_unfreed_memory_prevents_a_launch();
    test_event_nodes_record_and_wait();
    test_conditional_node_runs_one_graph();
    test_conditional_node_is_updated();
    test_wrong_conditional_nodes_are_refused();
    test_launch_after_free_is_refused();
    test_user_object_lives_as_long_as_its_graphs();
    test_edge_data_is_stored_with_the_nodes();
    test_wrong_graphs_are_refused();
}
