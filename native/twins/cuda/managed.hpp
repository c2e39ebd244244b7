// Advice about managed memory and the location to which it was prefetched. The twin only remembers them: managed memory
// is memory of the host, which all devices can access at all times.
#pragma once

#include <cstdint>
#include <set>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// The advice about some pages. A location of type location_none means that the program gave none.
struct Advice {
    bool is_read_mostly = false;
    Location preferred{};
    Location prefetched{};
    std::set<Device> accessed_by; // devices, or cpu_device
};

} // namespace gdrkit::twin::cuda
