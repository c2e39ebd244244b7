// Conditional nodes: nodes that run one of their graphs, or none, according to the value of a condition. Only a kernel
// can set the value during a launch. The twin runs no kernels, so the value stays as it is at the start of the launch.
#pragma once

#include "cuda/graph.hpp"

namespace gdrkit::twin::cuda {

// The following functions require graph_mutex().

// Make the graphs of a new conditional node of the graph, and store their handles in the parameters.
Result make_conditional(const GraphRef& graph, ConditionalParameters* parameters, ConditionalNode* node);

// Return the graph that a launch runs; null if it runs none. Fail if the launch would not end.
Result choose_body(const ConditionalNode& node, GraphRef* body);

// Return whether two conditional nodes have the same type, and graphs with the same nodes. Only then can an update of
// an executable graph replace one by the other. Conditions and parameters of inner nodes may differ.
bool has_same_bodies(const ConditionalNode& node, const ConditionalNode& other);

// Fail with invalid_value if the graph has a condition that no node uses, or if a graph of a conditional node contains
// nodes of a type that is not allowed there.
Result check_conditionals(const Graph& graph);

} // namespace gdrkit::twin::cuda
