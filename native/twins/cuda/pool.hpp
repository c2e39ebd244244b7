// Memory pools. Each allocation of a pool has separate memory; the pool only counts its bytes.
#pragma once

#include <cstdint>

#include "cuda/cuda_abi.hpp"
#include "cuda/memory.hpp"

namespace gdrkit::twin::cuda {

// Count an allocation of a pool as freed.
void record_pool_free(Handle pool, std::uint64_t length_bytes);

// Return the CUmemAccess_flags with which a device may access a range of a pool. They are the pool's flags, also after
// the pool was destroyed.
int pool_access_of(const Range& range, Device device);

} // namespace gdrkit::twin::cuda
