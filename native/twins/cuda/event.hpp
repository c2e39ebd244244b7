// Events: each holds the marker of the point in a stream where it was recorded last.
#pragma once

#include "cuda/cuda_abi.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {

// The point that the event of this handle was recorded at last; *marker stays empty when it was never recorded.
Result find_recorded(Handle event, MarkerRef* marker);

// The context ends, and its events with it.
void release_events_of(Handle context);

} // namespace gdrkit::twin::cuda
