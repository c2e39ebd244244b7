// Conditional nodes: nodes that run one of their graphs, or none, according to the value of a condition. Only a kernel
// can set the value during a launch, so it keeps the value with which the launch begins.
#pragma once

#include "cuda/graph.hpp"

namespace gdrkit::twin::cuda {

// The following functions require graph_mutex().

// Make the graphs of a new conditional node of the graph, and store their handles in the parameters.
Result make_conditional(const GraphRef& graph, ConditionalParameters* parameters, ConditionalNode* node);

// Return the graph that a launch runs; null if it runs none. Fails if the launch would not end.
Result choose_body(const ConditionalNode& node, GraphRef* body);

// Return whether an executable graph may get the parameters of the other node, except its condition and the parameters
// in its graphs.
bool has_same_bodies(const ConditionalNode& node, const ConditionalNode& other);

// Fail with invalid_value if a condition of the graph has no node, or the graph of a conditional node has nodes of a
// type that is not allowed in it.
Result check_conditionals(const Graph& graph);

} // namespace gdrkit::twin::cuda
