// The launch of an executable graph.
#pragma once

#include <functional>
#include <vector>

#include "cuda/graph.hpp"

namespace gdrkit::twin::cuda {

// Return the nodes in a random order in which each node follows its dependencies. It is shorter if there is a cycle.
std::vector<NodeRef> draw_random_order(const Graph& graph);

// Prepare the work of one launch, without the nodes that are copies of the disabled nodes. Memory is allocated and
// freed, and events count as recorded, when this function returns. If it fails, nothing has changed.
Result prepare_launch(const ContextRef& context, const Graph& graph, std::uint64_t flags,
                      const std::vector<Handle>& disabled, std::function<void()>* work);

} // namespace gdrkit::twin::cuda
