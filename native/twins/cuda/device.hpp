// The emulated GPUs.
#pragma once

#include <cstdint>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

inline constexpr std::uint64_t device_memory_bytes = std::uint64_t{8} << 30;

// Return whether the device ordinal is valid.
bool device_exists(Device device);

} // namespace gdrkit::twin::cuda
