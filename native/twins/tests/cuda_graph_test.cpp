// Tests of the software twin of libcuda: CUDA graphs with their nodes and dependencies, executable graphs and launches.
#include <algorithm>
#include <atomic>

#include "cuda/graph_abi.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr u64 length_bytes = 1000;
const Handle* const no_nodes = nullptr;

Handle create_graph() {
    Handle graph = 0;
    EXPECT_SUCCESS("cuGraphCreate", &graph, 0U);
    return graph;
}

Handle create_stream() {
    Handle stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 1U);
    return stream;
}

Copy3d make_copy(u64 to, u64 from) {
    Copy3d copy{};
    copy.to.memory_type = copy.from.memory_type = memory_unified;
    copy.to.device = to;
    copy.from.device = from;
    copy.width_bytes = length_bytes;
    copy.height = copy.depth = 1;
    return copy;
}

Handle add_copy(Handle graph, const std::vector<Handle>& dependencies, u64 to, u64 from) {
    Handle node = 0;
    const Copy3d copy = make_copy(to, from);
    EXPECT_SUCCESS("cuGraphAddMemcpyNode", &node, graph, dependencies.data(), u64{dependencies.size()}, &copy,
                   Handle{0});
    return node;
}

Handle add_fill(Handle graph, const std::vector<Handle>& dependencies, u64 to, unsigned value) {
    Handle node = 0;
    const FillParameters fill{to, 0, value, 1, length_bytes, 1};
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
    const u64 first = allocate(length_bytes), second = allocate(length_bytes);
    static std::atomic<int> calls{0};
    const HostParameters host{[](void* count) { ++*static_cast<std::atomic<int>*>(count); }, &calls};
    // The nodes are added in the reverse order.
    Handle host_node = 0;
    EXPECT_SUCCESS("cuGraphAddHostNode", &host_node, graph, no_nodes, u64{0}, &host);
    const Handle copy = add_copy(graph, {}, second, first), fill = add_fill(graph, {}, first, 7);
    const Handle from[] = {fill, copy}, to[] = {copy, host_node};
    EXPECT_SUCCESS("cuGraphAddDependencies", graph, static_cast<const Handle*>(from), static_cast<const Handle*>(to),
                   u64{2});
    const Handle executable = instantiate_graph(graph);
    CHECK(calls == 0);
    for (int round = 1; round <= 20; ++round) {
        EXPECT_SUCCESS("cuMemsetD8_v2", first, static_cast<unsigned char>(round), length_bytes);
        EXPECT_SUCCESS("cuMemsetD8_v2", second, static_cast<unsigned char>(round), length_bytes);
        EXPECT_SUCCESS("cuCtxSynchronize");
        launch_and_wait(executable, stream);
        CHECK(read_device(second, length_bytes) == std::vector<unsigned char>(length_bytes, 7) && calls == round);
    }
    CHECK((list_nodes("cuGraphGetNodes", graph) == std::vector{host_node, copy, fill}));
    CHECK(list_nodes("cuGraphGetRootNodes", graph) == std::vector{fill});
    CHECK(list_nodes("cuGraphNodeGetDependencies", copy) == std::vector{fill});
    CHECK(list_nodes("cuGraphNodeGetDependentNodes", copy) == std::vector{host_node});
    CHECK(get_node_type(copy) == node_copy && get_node_type(fill) == node_fill &&
          get_node_type(host_node) == node_host);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    launch_and_wait(executable, stream);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_RESULT(invalid_value, "cuGraphLaunch", executable, stream);
    EXPECT_SUCCESS("cuMemFree_v2", first);
    EXPECT_SUCCESS("cuMemFree_v2", second);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A change of the graph does not change an executable graph, but an update does.
void test_executable_graph_is_updated() {
    const Handle graph = create_graph(), stream = create_stream();
    const u64 memory = allocate(length_bytes);
    const Handle node = add_fill(graph, {}, memory, 1), executable = instantiate_graph(graph);
    FillParameters fill{memory, 0, 2, 1, length_bytes, 1};
    EXPECT_SUCCESS("cuGraphMemsetNodeSetParams", node, &fill);
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, 1)[0] == 1);
    UpdateInformation information{9, 9, 9};
    EXPECT_SUCCESS("cuGraphExecUpdate_v2", executable, graph, &information);
    CHECK(information.result == update_success && information.error_node == 0);
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, 1)[0] == 2);
    fill.value = 3;
    EXPECT_SUCCESS("cuGraphExecMemsetNodeSetParams", executable, node, &fill, Handle{0});
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, 1)[0] == 3);
    EXPECT_SUCCESS("cuGraphNodeSetEnabled", executable, node, 0U);
    EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(0), length_bytes);
    EXPECT_SUCCESS("cuCtxSynchronize");
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, 1)[0] == 0);
    add_fill(graph, {node}, memory, 4);
    EXPECT_RESULT(graph_update_failure, "cuGraphExecUpdate_v2", executable, graph, &information);
    CHECK(information.result == update_topology_changed);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_child_graph_and_clone_are_copies() {
    const Handle child = create_graph(), graph = create_graph(), stream = create_stream();
    const u64 memory = allocate(length_bytes);
    const Handle fill = add_fill(child, {}, memory, 5);
    Handle node = 0, copy = 0, clone = 0, fill_in_clone = 0;
    EXPECT_SUCCESS("cuGraphAddChildGraphNode", &node, graph, no_nodes, u64{0}, child);
    EXPECT_SUCCESS("cuGraphChildGraphNodeGetGraph", node, &copy);
    CHECK(copy != child && list_nodes("cuGraphGetNodes", copy).size() == 1);
    EXPECT_RESULT(invalid_value, "cuGraphDestroy", copy);
    EXPECT_SUCCESS("cuGraphClone", &clone, child);
    EXPECT_SUCCESS("cuGraphNodeFindInClone", &fill_in_clone, fill, clone);
    CHECK(list_nodes("cuGraphGetNodes", clone) == std::vector{fill_in_clone});
    EXPECT_SUCCESS("cuGraphDestroy", child);
    const Handle executable = instantiate_graph(graph);
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, length_bytes)[length_bytes - 1] == 5);
    for (const Handle graph_to_destroy : {graph, clone}) {
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
    const u64 free_before = query_free_memory(), result = allocate(length_bytes);
    AllocateParameters parameters{};
    parameters.pool.allocation_type = allocation_pinned;
    parameters.pool.location = {location_device, 0};
    parameters.length_bytes = length_bytes;
    Handle allocation_node = 0, free_node = 0, unused_handle = 0;
    EXPECT_SUCCESS("cuGraphAddMemAllocNode", &allocation_node, graph, no_nodes, u64{0}, &parameters);
    const Handle fill_node = add_fill(graph, {allocation_node}, parameters.pointer, 6);
    const Handle copy_node = add_copy(graph, {fill_node}, result, parameters.pointer);
    EXPECT_SUCCESS("cuGraphAddMemFreeNode", &free_node, graph, &copy_node, u64{1}, parameters.pointer);
    EXPECT_RESULT(invalid_value, "cuGraphAddMemFreeNode", &unused_handle, graph, &copy_node, u64{1},
                  parameters.pointer);
    EXPECT_RESULT(invalid_value, "cuGraphAddMemFreeNode", &unused_handle, graph, &copy_node, u64{1}, result);
    const Handle executable = instantiate_graph(graph);
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithFlags", &unused_handle, graph, u64{0});
    EXPECT_RESULT(invalid_value, "cuGraphClone", &unused_handle, graph);
    EXPECT_RESULT(invalid_value, "cuMemsetD8_v2", parameters.pointer, static_cast<unsigned char>(1), u64{1});
    for (int round = 0; round < 3; ++round) {
        EXPECT_SUCCESS("cuMemsetD8_v2", result, static_cast<unsigned char>(0), length_bytes);
        EXPECT_SUCCESS("cuCtxSynchronize");
        launch_and_wait(executable, stream);
        CHECK(read_device(result, length_bytes) == std::vector<unsigned char>(length_bytes, 6));
    }
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuMemFree_v2", result);
    CHECK(wait_for_free_memory(free_before));
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// The current use counts the memory that graphs have allocated and that is not freed. The high mark is the largest use
// so far.
void test_memory_of_graphs_is_counted() {
    const Handle graph = create_graph(), stream = create_stream();
    AllocateParameters parameters{};
    parameters.pool.allocation_type = allocation_pinned;
    parameters.pool.location = {location_device, 0};
    parameters.length_bytes = length_bytes;
    Handle node = 0;
    const auto query_attribute = [](int number) {
        u64 value = 9;
        EXPECT_SUCCESS("cuDeviceGetGraphMemAttribute", 0, number, &value);
        return value;
    };
    u64 zero = 0;
    EXPECT_SUCCESS("cuDeviceSetGraphMemAttribute", 0, 1, &zero);
    CHECK(query_attribute(0) == 0 && query_attribute(1) == 0);
    EXPECT_SUCCESS("cuGraphAddMemAllocNode", &node, graph, no_nodes, u64{0}, &parameters);
    const Handle executable = instantiate_graph(graph);
    CHECK(query_attribute(0) == 0);
    launch_and_wait(executable, stream);
    CHECK(query_attribute(0) == length_bytes && query_attribute(1) == length_bytes &&
          query_attribute(2) == length_bytes);
    EXPECT_SUCCESS("cuMemFree_v2", parameters.pointer);
    CHECK(query_attribute(0) == 0 && query_attribute(1) == length_bytes && query_attribute(3) >= length_bytes);
    EXPECT_RESULT(invalid_value, "cuDeviceSetGraphMemAttribute", 0, 0, &zero);
    EXPECT_SUCCESS("cuDeviceSetGraphMemAttribute", 0, 1, &zero);
    CHECK(query_attribute(1) == 0);
    EXPECT_RESULT(invalid_value, "cuDeviceGetGraphMemAttribute", 0, 4, &zero);
    EXPECT_RESULT(invalid_device, "cuDeviceGetGraphMemAttribute", 99, 0, &zero);
    EXPECT_SUCCESS("cuDeviceGraphMemTrim", 0);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// Memory that the graph does not free stays allocated until the program frees it. With instantiate_auto_free, the next
// launch frees it.
void test_unfreed_memory_prevents_a_launch() {
    const Handle stream = create_stream();
    for (const u64 flags : {u64{0}, u64{instantiate_auto_free}}) {
        const Handle graph = create_graph();
        AllocateParameters parameters{};
        parameters.pool.allocation_type = allocation_pinned;
        parameters.pool.location = {location_device, 0};
        parameters.length_bytes = length_bytes;
        Handle allocation_node = 0;
        EXPECT_SUCCESS("cuGraphAddMemAllocNode", &allocation_node, graph, no_nodes, u64{0}, &parameters);
        add_fill(graph, {allocation_node}, parameters.pointer, 6);
        const Handle executable = instantiate_graph(graph, flags);
        launch_and_wait(executable, stream);
        CHECK(read_device(parameters.pointer, length_bytes)[1] == 6);
        EXPECT_RESULT(flags == 0 ? invalid_value : success, "cuGraphLaunch", executable, stream);
        EXPECT_SUCCESS("cuMemFreeAsync", parameters.pointer, stream);
        launch_and_wait(executable, stream);
        EXPECT_SUCCESS("cuMemFree_v2", parameters.pointer);
        EXPECT_SUCCESS("cuGraphExecDestroy", executable);
        EXPECT_SUCCESS("cuGraphDestroy", graph);
    }
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_event_nodes_record_and_wait() {
    const Handle graph = create_graph(), stream = create_stream();
    Handle event = 0, record_node = 0, wait_node = 0;
    EXPECT_SUCCESS("cuEventCreate", &event, 0U);
    const u64 memory = allocate(length_bytes);
    const Handle fill_node = add_fill(graph, {}, memory, 8);
    EXPECT_SUCCESS("cuGraphAddEventRecordNode", &record_node, graph, &fill_node, u64{1}, event);
    EXPECT_SUCCESS("cuGraphAddEventWaitNode", &wait_node, graph, no_nodes, u64{0}, event);
    const Handle executable = instantiate_graph(graph);
    for (int round = 0; round < 5; ++round) {
        EXPECT_SUCCESS("cuGraphLaunch", executable, stream);
        EXPECT_SUCCESS("cuEventSynchronize", event);
        CHECK(read_device(memory, length_bytes)[length_bytes - 1] == 8);
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
    const auto wait_until_destroyed = [](int count) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (destroyed_count != count && std::chrono::steady_clock::now() < deadline) {
            sched_yield();
        }
        return destroyed_count == count;
    };
    const auto count_destruction = +[](void* count) { ++*static_cast<std::atomic<int>*>(count); };
    const Handle graph = create_graph();
    Handle object = 0, private_object = 0;
    EXPECT_RESULT(invalid_value, "cuUserObjectCreate", &object, static_cast<void*>(&destroyed_count), count_destruction,
                  1U, 0U);
    EXPECT_SUCCESS("cuUserObjectCreate", &object, static_cast<void*>(&destroyed_count), count_destruction, 1U, 1U);
    EXPECT_SUCCESS("cuUserObjectCreate", &private_object, static_cast<void*>(&destroyed_count), count_destruction, 1U,
                   1U);
    EXPECT_SUCCESS("cuUserObjectRetain", private_object, 1U);
    EXPECT_SUCCESS("cuGraphRetainUserObject", graph, object, 1U, 1U);
    EXPECT_RESULT(invalid_value, "cuUserObjectRelease", object, 1U); // the graph has got the reference
    EXPECT_RESULT(invalid_value, "cuUserObjectRelease", private_object, 3U);
    EXPECT_SUCCESS("cuUserObjectRelease", private_object, 2U);
    CHECK(wait_until_destroyed(1));
    const Handle executable = instantiate_graph(graph);
    EXPECT_SUCCESS("cuGraphReleaseUserObject", graph, object, 1U);
    EXPECT_RESULT(invalid_value, "cuGraphReleaseUserObject", graph, object, 1U);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    CHECK(destroyed_count == 1);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    CHECK(wait_until_destroyed(2));
}

// Add a conditional node of this type to the graph, and store the body graphs of the node. Return the node.
Handle add_conditional(Handle graph, unsigned value, int type, unsigned body_count, std::vector<Handle>* bodies) {
    Handle condition = 0, node = 0;
    EXPECT_SUCCESS("cuGraphConditionalHandleCreate", &condition, graph, Handle{0}, value, condition_assign_default);
    NodeParameterUnion parameters{};
    parameters.type = node_conditional;
    parameters.conditional = {condition, type, body_count, nullptr, 0};
    EXPECT_SUCCESS("cuGraphAddNode_v2", &node, graph, no_nodes, static_cast<const EdgeData*>(nullptr), u64{0},
                   &parameters);
    CHECK(get_node_type(node) == node_conditional);
    bodies->assign(parameters.conditional.bodies, parameters.conditional.bodies + body_count);
    return node;
}

// Each row has the type of the node, the number of its body graphs, the value of the condition, and the index of the
// body graph that runs (-1: none).
void test_conditional_node_runs_one_graph() {
    struct Row {
        int type;
        unsigned body_count, value;
        int running_body;
    };
    const Handle stream = create_stream();
    const u64 memory = allocate(length_bytes);
    for (const Row& row :
         {Row{conditional_if, 1, 0, -1}, Row{conditional_if, 1, 7, 0}, Row{conditional_if, 2, 0, 1},
          Row{conditional_if, 2, 1, 0}, Row{conditional_while, 1, 0, -1}, Row{conditional_switch, 3, 0, 0},
          Row{conditional_switch, 3, 2, 2}, Row{conditional_switch, 3, 3, -1}}) {
        const Handle graph = create_graph();
        std::vector<Handle> bodies, inner;
        add_conditional(graph, row.value, row.type, row.body_count, &bodies);
        for (unsigned index = 0; index < row.body_count; ++index) {
            add_conditional(bodies[index], 1, conditional_if, 1, &inner);
            add_fill(inner[0], {}, memory, index + 1);
        }
        EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(0), length_bytes);
        EXPECT_SUCCESS("cuCtxSynchronize");
        const Handle executable = instantiate_graph(graph);
        launch_and_wait(executable, stream);
        CHECK(read_device(memory, length_bytes) ==
              std::vector<unsigned char>(length_bytes, static_cast<unsigned char>(row.running_body + 1)));
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
    const u64 memory = allocate(length_bytes);
    std::vector<Handle> bodies;
    add_conditional(graph, 0, conditional_if, 1, &bodies);
    add_fill(bodies[0], {}, memory, 1);
    const Handle executable = instantiate_graph(graph);
    UpdateInformation information{};
    add_conditional(other_type_graph, 0, conditional_switch, 1, &bodies);
    add_fill(bodies[0], {}, memory, 1);
    EXPECT_RESULT(graph_update_failure, "cuGraphExecUpdate_v2", executable, other_type_graph, &information);
    CHECK(information.result == update_parameters_changed);
    add_conditional(same_type_graph, 1, conditional_if, 1, &bodies);
    EXPECT_RESULT(graph_update_failure, "cuGraphExecUpdate_v2", executable, same_type_graph, &information);
    add_fill(bodies[0], {}, memory, 2);
    EXPECT_SUCCESS("cuGraphExecUpdate_v2", executable, same_type_graph, &information);
    launch_and_wait(executable, stream);
    CHECK(read_device(memory, length_bytes) == std::vector<unsigned char>(length_bytes, 2));
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
    EXPECT_RESULT(invalid_value, "cuGraphConditionalHandleCreate", &condition, graph, Handle{0}, 0U, 2U);
    EXPECT_RESULT(invalid_value, "cuGraphConditionalHandleCreate", &condition, Handle{5}, Handle{0}, 0U, 0U);
    EXPECT_SUCCESS("cuGraphConditionalHandleCreate", &condition, graph, Handle{0}, 1U, condition_assign_default);
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithFlags", &unused_handle, graph,
                  u64{0}); // the condition has no node
    const auto add = [&](Handle to, int type, unsigned body_count) {
        NodeParameterUnion parameters{};
        parameters.type = node_conditional;
        parameters.conditional = {condition, type, body_count, nullptr, 0};
        return call_driver("cuGraphAddNode", &node, to, no_nodes, u64{0}, &parameters);
    };
    CHECK(add(second_graph, conditional_if, 1) == invalid_value);
    CHECK(add(graph, conditional_if, 3) == invalid_value && add(graph, conditional_while, 2) == invalid_value);
    CHECK(add(graph, conditional_switch, 0) == invalid_value && add(graph, 3, 1) == invalid_value);
    CHECK(add(graph, conditional_while, 1) == success && add(graph, conditional_while, 1) == invalid_value);
    EXPECT_RESULT(invalid_value, "cuGraphClone", &unused_handle, graph);
    EXPECT_RESULT(invalid_value, "cuGraphAddChildGraphNode", &unused_handle, second_graph, no_nodes, u64{0}, graph);
    const Handle executable = instantiate_graph(graph);
    EXPECT_RESULT(not_supported, "cuGraphLaunch", executable, stream); // no kernel can end the loop
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    std::vector<Handle> bodies;
    add_conditional(second_graph, 0, conditional_if, 1, &bodies);
    const HostParameters host{[](void*) {}, nullptr};
    EXPECT_SUCCESS("cuGraphAddHostNode", &node, bodies[0], no_nodes, u64{0}, &host);
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithFlags", &unused_handle, second_graph, u64{0});
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuGraphDestroy", second_graph);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// If the memory of a node was freed, a launch fails and changes nothing.
void test_launch_after_free_is_refused() {
    const Handle graph = create_graph(), stream = create_stream();
    const u64 memory = allocate(length_bytes);
    add_fill(graph, {}, memory, 1);
    const Handle executable = instantiate_graph(graph);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_RESULT(invalid_value, "cuGraphLaunch", executable, stream);
    EXPECT_SUCCESS("cuGraphExecDestroy", executable);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_wrong_graphs_are_refused() {
    const Handle graph = create_graph(), second_graph = create_graph();
    Handle first = 0, second = 0, unused_handle = 0;
    EXPECT_RESULT(invalid_value, "cuGraphCreate", &unused_handle, 1U);
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &first, graph, no_nodes, u64{0});
    EXPECT_SUCCESS("cuGraphAddEmptyNode", &second, graph, &first, u64{1});
    EXPECT_RESULT(invalid_value, "cuGraphAddEmptyNode", &unused_handle, second_graph, &first, u64{1});
    const Handle twice[] = {first, first};
    EXPECT_RESULT(invalid_value, "cuGraphAddEmptyNode", &unused_handle, graph, static_cast<const Handle*>(twice),
                  u64{2});
    EXPECT_RESULT(invalid_value, "cuGraphAddDependencies", graph, &first, &second, u64{1});
    EXPECT_RESULT(invalid_value, "cuGraphRemoveDependencies", graph, &second, &first, u64{1});
    EXPECT_SUCCESS("cuGraphAddDependencies", graph, &second, &first, u64{1});
    InstantiateParameters parameters{0, 0, 1, 9};
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithParams", &unused_handle, graph, &parameters);
    CHECK(parameters.result == instantiate_invalid_structure && parameters.error_node != 0);
    EXPECT_SUCCESS("cuGraphRemoveDependencies", graph, &second, &first, u64{1});
    EXPECT_RESULT(invalid_value, "cuGraphInstantiateWithFlags", &unused_handle, graph, u64{0x100});
    Copy3d copy = make_copy(0x1000, 0x2000);
    copy.to.memory_type = memory_device;
    const Copy3d* const parameters_of_copy = &copy;
    EXPECT_RESULT(invalid_value, "cuGraphAddMemcpyNode", &unused_handle, graph, no_nodes, u64{0}, parameters_of_copy,
                  Handle{0});
    EXPECT_RESULT(invalid_context, "cuGraphAddMemcpyNode", &unused_handle, graph, no_nodes, u64{0}, parameters_of_copy,
                  Handle{5});
    const FillParameters fill{0x1000, 0, 0, 3, length_bytes, 1};
    EXPECT_RESULT(invalid_value, "cuGraphAddMemsetNode", &unused_handle, graph, no_nodes, u64{0}, &fill, Handle{0});
    EXPECT_SUCCESS("cuGraphDestroyNode", first);
    CHECK(list_nodes("cuGraphGetNodes", graph) == std::vector{second} &&
          list_nodes("cuGraphGetRootNodes", graph).size() == 1);
    EXPECT_RESULT(invalid_value, "cuGraphDestroyNode", first);
    EXPECT_SUCCESS("cuGraphDestroy", graph);
    EXPECT_SUCCESS("cuGraphDestroy", second_graph);
    EXPECT_RESULT(invalid_value, "cuGraphAddEmptyNode", &unused_handle, graph, no_nodes, u64{0});
}

} // namespace

int main() {
    init_device();
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
    test_wrong_graphs_are_refused();
}
