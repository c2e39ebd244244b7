// Prepares the launch of an executable graph.
#pragma once

#include <functional>
#include <vector>

#include "cuda/graph.hpp"

namespace gdrkit::twin::cuda {

// Return the nodes in a random order in which each node follows its dependencies. If the graph has a cycle, the nodes
// of the cycle and all nodes that depend on them are missing.
std::vector<NodeRef> draw_random_order(const Graph& graph);

// Prepare the work of one launch. `disabled_nodes` has handles of nodes of the original graph whose copies do not run.
// When this function returns, memory is allocated and freed, and the records of events have begun. If it fails, nothing
// has changed.
Result prepare_launch(const ContextRef& context, const Graph& graph, std::uint64_t flags,
                      const std::vector<Handle>& disabled_nodes, std::function<void()>* work);

} // namespace gdrkit::twin::cuda
