// Conditional nodes: nodes that run one of their graphs, or none, according to the value of a condition. Only a kernel
// can set the value during a launch. The twin runs no kernels, so the value stays as it is at the start of the launch.
#pragma once

#include "cuda/graph.hpp"

namespace gdrkit::twin::cuda {

// The following functions require graph_mutex().

// Make the graphs that a new conditional node of `graph` can run, and store their handles in `parameters`. Fail with
// invalid_value if another node uses the condition.
Result make_conditional(const GraphRef& graph, ConditionalParameters* parameters, ConditionalNode* node);

// Store the graph that a launch of the node runs; null if it runs none. Fail if the node would run its graph without
// end.
Result choose_body(const ConditionalNode& node, GraphRef* body);

// Return whether two conditional nodes have the same type and the same structure: corresponding nodes of their body
// graphs have the same type and the same number of dependencies. Only then can an update of an executable graph replace
// one conditional node by the other. The conditions, and the parameters of the body nodes, may differ.
bool have_same_structure(const ConditionalNode& node, const ConditionalNode& other);

// Fail with invalid_value if the graph has a condition that no node uses, or if a body graph contains a node of a
// type that CUDA does not allow in body graphs.
Result check_conditionals(const Graph& graph);

} // namespace gdrkit::twin::cuda
