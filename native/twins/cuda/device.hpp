// The emulated GPUs.
#pragma once

#include <cstdint>

#include "cuda/cuda_abi.hpp"
#include "model/gpu.hpp"

namespace gdrkit::twin::cuda {

// The largest distance between two rows of a copy or memset.
inline constexpr std::uint64_t max_pitch_bytes = 0x7fffffff;

// An H200 has this number. The twin runs no kernels on them.
inline constexpr int multiprocessor_count = 132;

inline constexpr std::uint64_t device_memory_bytes = gpu_memory_bytes;

// Return whether the device ordinal is valid.
bool device_exists(Device device);

} // namespace gdrkit::twin::cuda
