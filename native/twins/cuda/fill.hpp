// The memset that a node of a graph carries out.
#pragma once

#include <functional>

#include "cuda/context.hpp"
#include "cuda/graph_abi.hpp"

namespace gdrkit::twin::cuda {

// Check a memset and store the function that carries it out, or an empty function if there is nothing to write.
Result prepare_fill(const ContextRef& context, const FillParameters& parameters, std::function<void()>* work);

} // namespace gdrkit::twin::cuda
