// Advice about managed memory and the location to which it was prefetched. The twin only stores both, because its
// managed memory is host memory, which all devices can access at all times.
#pragma once

#include <cstdint>
#include <set>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// The advice about some pages, and the location of their last prefetch. A location of the type location_none means that
// the program has given no location.
struct Advice {
    bool is_read_mostly = false;
    Location preferred_location{};
    Location prefetched_location{};
    std::set<Device> accessed_by; // devices (or cpu_device) that the program has set by advise_set_accessed_by
};

} // namespace gdrkit::twin::cuda
