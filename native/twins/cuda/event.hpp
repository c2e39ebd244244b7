// Events: each holds the marker of the point in a stream at which it was last recorded.
#pragma once

#include "cuda/cuda_abi.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {

// Get the marker of the event with this handle; null if the event was never recorded. Fails with invalid_handle.
Result find_recorded_marker(Handle event, MarkerRef* marker);

// Destroy all events of a context that ends.
void destroy_events_of(Handle context);

} // namespace gdrkit::twin::cuda
