// Memsets of graphs.
#pragma once

#include <functional>

#include "cuda/context.hpp"
#include "cuda/graph_abi.hpp"

namespace gdrkit::twin::cuda {

// Check a memset and return the work that carries it out, which is empty if there is nothing to write.
Result prepare_fill(const ContextRef& context, const FillParameters& parameters, std::function<void()>* work);

} // namespace gdrkit::twin::cuda
