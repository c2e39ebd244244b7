// Conditional nodes of graphs: the conditions of these nodes, and the graphs that these nodes run.
#include "cuda/conditional.hpp"

#include <algorithm>
#include <cstdio>

namespace gdrkit::twin::cuda {
namespace {

// Find a condition that a node of the graph can use: a condition of the graph or, if a conditional node runs the graph,
// of an outer graph.
ConditionRef find_condition(const GraphRef& graph, Handle handle) {
    for (GraphRef candidate = graph; candidate; candidate = candidate->parent.lock()) {
        if (const auto entry = candidate->conditions.find(handle); entry != candidate->conditions.end()) {
            return entry->second;
        }
    }
    return nullptr;
}

bool has_valid_body_count(const ConditionalParameters& parameters) {
    switch (parameters.type) {
    case conditional_if:
        return parameters.body_count == 1 || parameters.body_count == 2;
    case conditional_while:
        return parameters.body_count == 1;
    case conditional_switch:
        return parameters.body_count > 0;
    default:
        return false;
    }
}

Result find_condition_context(Handle handle, ContextRef* context) {
    return handle == 0 ? find_current_context(context) : find_context(handle, context);
}

bool is_allowed_in_body(NodeType type) {
    return type == node_empty || type == node_copy || type == node_fill || type == node_graph ||
           type == node_conditional;
}

// Return whether a conditional node may run all nodes of the graph and of its child graphs.
bool is_valid_body(const Graph& graph) {
    return std::ranges::all_of(graph.nodes, [](const NodeRef& node) {
        const auto* const child = std::get_if<ChildNode>(&node->parameters);
        return is_allowed_in_body(get_node_type(*node)) && (child == nullptr || is_valid_body(*child->graph));
    });
}

bool have_matching_nodes(const Graph& graph, const Graph& other) {
    return std::ranges::equal(graph.nodes, other.nodes, [](const NodeRef& left, const NodeRef& right) {
        const auto* const conditional = std::get_if<ConditionalNode>(&left->parameters);
        return get_node_type(*left) == get_node_type(*right) &&
               left->dependencies.size() == right->dependencies.size() &&
               (conditional == nullptr ||
                have_same_structure(*conditional, std::get<ConditionalNode>(right->parameters)));
    });
}

} // namespace

Result make_conditional(const GraphRef& graph, ConditionalParameters* parameters, ConditionalNode* node) {
    const ConditionRef condition = find_condition(graph, parameters->condition);
    ContextRef context;
    if (!condition || condition->is_used || !has_valid_body_count(*parameters)) {
        return invalid_value;
    }
    if (const Result result = find_condition_context(parameters->context, &context); result != success) {
        return result;
    }
    if (condition->context.lock() != context) {
        return invalid_value;
    }
    condition->is_used = true;
    node->condition = condition;
    node->type = parameters->type;
    node->body_handles = std::make_shared<std::vector<Handle>>();
    for (unsigned body_index = 0; body_index < parameters->body_count; ++body_index) {
        const GraphRef body = make_graph();
        body->is_child = true;
        body->parent = graph;
        node->bodies.push_back(body);
        node->body_handles->push_back(body->handle);
    }
    parameters->bodies = node->body_handles->data();
    return success;
}

Result choose_body(const ConditionalNode& node, GraphRef* body) {
    const unsigned value = node.condition->value_at_launch;
    if (node.type == conditional_while && value != 0) {
        std::fprintf(stderr, "gdrkit: a conditional node of type WHILE has a condition that is not zero when the graph "
                             "is launched. Only a kernel can end the loop, and the software twin of CUDA runs no "
                             "kernels\n");
        return not_supported;
    }
    // An IF node runs body 0 if the value is not zero, else body 1 if it has two bodies. A SWITCH node runs the body
    // whose index is the value, if there is one. A WHILE node runs no body, because its value is zero here.
    const std::size_t body_index = node.type == conditional_switch ? value : value != 0 ? 0 : 1;
    *body = body_index < node.bodies.size() && node.type != conditional_while ? node.bodies[body_index] : nullptr;
    return success;
}

bool have_same_structure(const ConditionalNode& node, const ConditionalNode& other) {
    return node.type == other.type &&
           std::ranges::equal(node.bodies, other.bodies, [](const GraphRef& left, const GraphRef& right) {
               return have_matching_nodes(*left, *right);
           });
}

Result check_conditionals(const Graph& graph) {
    if (!std::ranges::all_of(graph.conditions, [](const auto& entry) { return entry.second->is_used; })) {
        return invalid_value;
    }
    for (const NodeRef& node : graph.nodes) {
        const auto* const conditional = std::get_if<ConditionalNode>(&node->parameters);
        const bool is_valid = conditional == nullptr || std::ranges::all_of(conditional->bodies, [](const auto& body) {
                                  return is_valid_body(*body) && check_conditionals(*body) == success;
                              });
        if (!is_valid) {
            return invalid_value;
        }
    }
    return success;
}

GDRKIT_CUDA_ENTRY Result cuGraphConditionalHandleCreate(Handle* handle, Handle graph_handle, Handle context_handle,
                                                        unsigned default_value, unsigned flags) {
    return run_with_graph("cuGraphConditionalHandleCreate", graph_handle, [&](const GraphRef& graph) {
        ContextRef context;
        if (handle == nullptr || (flags & ~condition_assign_default) != 0) {
            return invalid_value;
        }
        const Result result = find_condition_context(context_handle, &context);
        if (result == success) {
            auto condition = std::make_shared<Condition>();
            condition->context = context;
            // Without a default value, a condition keeps its value from the previous launch. Only kernels set a
            // value, and the twin runs no kernels, so the value is 0.
            condition->value_at_launch = (flags & condition_assign_default) != 0 ? default_value : 0;
            *handle = make_handle();
            graph->conditions[*handle] = std::move(condition);
        }
        return result;
    });
}

} // namespace gdrkit::twin::cuda
