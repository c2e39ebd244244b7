// Advice about managed memory and the location to which it was prefetched. The twin only stores both, because its
// managed memory is host memory, which all devices can access at all times.
#pragma once

#include <cstdint>
#include <set>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// The advice about some pages. The type location_none means that the program gave no location.
struct Advice {
    bool is_read_mostly = false;
    Location preferred_location{};
    Location prefetched_location{};
    std::set<Device> accessed_by; // devices, or cpu_device
};

} // namespace gdrkit::twin::cuda
