// The emulated GPUs.
#pragma once

#include <cstdint>

#include "cuda/cuda_abi.hpp"
#include "model/gpu.hpp"

namespace gdrkit::twin::cuda {

inline constexpr std::uint64_t device_memory_bytes = gpu_memory_bytes;

// Return whether the device ordinal is valid.
bool device_exists(Device device);

} // namespace gdrkit::twin::cuda
