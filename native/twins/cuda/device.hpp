// Limits of the emulated GPUs, and the check of a device ordinal.
#pragma once

#include <cstdint>

#include "cuda/cuda_abi.hpp"
#include "model/gpu.hpp"

namespace gdrkit::twin::cuda {

// The largest distance between two consecutive rows of a copy or memset.
inline constexpr std::uint64_t max_pitch_bytes = 0x7fffffff;

// The number of multiprocessors of an H200. The twin runs no kernels on them.
inline constexpr int multiprocessor_count = 132;

inline constexpr std::uint64_t device_capacity_bytes = gpu_memory_bytes;

// Return whether the device ordinal is valid.
bool device_exists(Device device);

} // namespace gdrkit::twin::cuda
