// The launch of an executable graph. A launch runs the nodes one after the other, in a random order that the
// dependencies allow, so that a program with a missing dependency fails.
#include "cuda/graph_launch.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "cuda/conditional.hpp"
#include "cuda/copy.hpp"
#include "cuda/event.hpp"
#include "cuda/fill.hpp"
#include "cuda/stream.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::cuda {
namespace {

// The preparation of one launch. It allocates and frees the memory of the graph at once, and collects the other work in
// `steps_`. If it fails, it undoes its changes to memory.
class LaunchPreparation {
public:
    LaunchPreparation(ContextRef context, std::uint64_t flags, const std::vector<Handle>& disabled_nodes)
        : context_(std::move(context)), flags_(flags), disabled_nodes_(disabled_nodes) {}

    Result prepare(const Graph& graph) {
        const Result result = prepare_graph(graph);
        if (result != success) {
            undo();
        }
        return result;
    }

    // Return the prepared work, which runs the steps one after the other. The records of events begin now, and end when
    // their nodes run.
    std::function<void()> take_work() {
        for (const auto& [index, event] : event_records_) {
            steps_[index] = begin_record(event);
        }
        return [steps = std::move(steps_)]() mutable {
            for (std::function<void()>& step : steps) {
                sleep_random_delay();
                if (step) {
                    step();
                }
                step = nullptr;
            }
        };
    }

private:
    Result prepare_graph(const Graph& graph) {
        for (const NodeRef& node : draw_random_order(graph)) {
            if (std::ranges::find(disabled_nodes_, node->original_handle) != disabled_nodes_.end()) {
                continue;
            }
            if (const Result result =
                    std::visit([&](const auto& parameters) { return add_steps(parameters); }, node->parameters);
                result != success) {
                return result;
            }
        }
        return success;
    }

    Result find_context_or_current(Handle handle, ContextRef* context) const {
        *context = context_;
        return handle == 0 ? success : find_context(handle, context);
    }

    Result add_steps(const EmptyNode&) { return success; }
    Result add_steps(const CopyNode& node) {
        ContextRef context;
        CopyRequest request;
        Result result = find_context_or_current(node.context, &context);
        if (result == success) {
            result = make_copy_request(&node.copy, &request);
        }
        return result == success ? prepare_copy(context, request, &steps_.emplace_back()) : result;
    }
    Result add_steps(const FillNode& node) {
        ContextRef context;
        const Result result = find_context_or_current(node.context, &context);
        return result == success ? prepare_fill(context, node.fill, &steps_.emplace_back()) : result;
    }
    Result add_steps(const HostParameters& node) {
        steps_.push_back(make_host_function_work(node.function, node.user_data));
        return success;
    }
    Result add_steps(const ChildNode& node) { return prepare_graph(*node.graph); }
    Result add_steps(const ConditionalNode& node) {
        GraphRef body;
        const Result result = choose_body(node, &body);
        return result == success && body ? prepare_graph(*body) : result;
    }
    Result add_steps(const RecordNode& node) {
        event_records_.emplace_back(steps_.size(), node.event);
        steps_.emplace_back();
        return event_exists(node.event) ? success : invalid_value;
    }
    Result add_steps(const WaitNode& node) {
        EventRecord record;
        const Result result = find_record(node.event, &record);
        steps_.emplace_back([record] { wait_until_done(record); });
        return result;
    }
    Result add_steps(const AllocateNode& node) {
        RangeRef range;
        const std::uint64_t base = node.memory->slot.base;
        if (find_range_by_base(base)) {
            if ((flags_ & instantiate_auto_free) == 0) {
                return invalid_value;
            }
            if (const Result result = remove_range(base, {MemoryKind::pool}, &range); result != success) {
                return result;
            }
            // When the stream reaches this step, the step drops its reference to the range. Without references, the
            // memory is freed.
            steps_.emplace_back([range]() mutable { range.reset(); });
            freed_ranges_.push_back(range);
        }
        const Result result =
            make_range(MemoryKind::pool, node.memory->device, node.memory->length_bytes, node.memory->slot, &range);
        if (result != success) {
            return result;
        }
        // The address belongs to the node, so the destruction of the range must not free the address.
        range->slot = {};
        range->owning_object = std::static_pointer_cast<Pool>(node.memory);
        add_range(range);
        record_graph_memory_use(range->device);
        allocated_ranges_.push_back(range);
        return success;
    }
    Result add_steps(const FreeNode& node) {
        RangeRef range;
        if (!find_range_by_base(node.pointer)) {
            return invalid_value;
        }
        const Result result = remove_range(node.pointer, {MemoryKind::pool}, &range);
        if (result == success) {
            freed_ranges_.push_back(range);
            steps_.emplace_back([range = std::move(range)]() mutable { range.reset(); });
        }
        return result;
    }

    // Remove the allocated ranges, and add the freed ranges that existed before the launch.
    void undo() {
        for (const RangeRef& range : allocated_ranges_) {
            RangeRef removed_range;
            if (find_range_by_base(range->base) == range) {
                (void)remove_range(range->base, {MemoryKind::pool}, &removed_range);
            }
        }
        for (const RangeRef& range : freed_ranges_) {
            if (std::ranges::find(allocated_ranges_, range) == allocated_ranges_.end()) {
                add_range(range);
            }
        }
    }

    ContextRef context_;
    std::uint64_t flags_;
    const std::vector<Handle>& disabled_nodes_;
    std::vector<std::function<void()>> steps_;
    std::vector<std::pair<std::size_t, Handle>> event_records_; // the index of the step, and the event, of each record
    std::vector<RangeRef> allocated_ranges_, freed_ranges_;
};

} // namespace

// Return the nodes in a random order in which each node follows its dependencies. If the graph has a cycle, the nodes
// of the cycle and all nodes that depend on them are missing.
std::vector<NodeRef> draw_random_order(const Graph& graph) {
    std::vector<NodeRef> order, ready_nodes;
    std::map<NodeRef, std::size_t> unmet_dependency_counts;
    for (const NodeRef& node : graph.nodes) {
        unmet_dependency_counts[node] = node->dependencies.size();
        if (node->dependencies.empty()) {
            ready_nodes.push_back(node);
        }
    }
    while (!ready_nodes.empty()) {
        const auto chosen_node = ready_nodes.begin() + static_cast<std::ptrdiff_t>(random_u64() % ready_nodes.size());
        const NodeRef node = *chosen_node;
        ready_nodes.erase(chosen_node);
        order.push_back(node);
        for (const NodeRef& other_node : graph.nodes) {
            if (std::ranges::find(other_node->dependencies, node) != other_node->dependencies.end() &&
                --unmet_dependency_counts[other_node] == 0) {
                ready_nodes.push_back(other_node);
            }
        }
    }
    return order;
}

Result prepare_launch(const ContextRef& context, const Graph& graph, std::uint64_t flags,
                      const std::vector<Handle>& disabled_nodes, std::function<void()>* work) {
    LaunchPreparation preparation(context, flags, disabled_nodes);
    const Result result = preparation.prepare(graph);
    if (result == success) {
        *work = preparation.take_work();
    }
    return result;
}

} // namespace gdrkit::twin::cuda
