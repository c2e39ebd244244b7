// Memory pools. Each allocation of a pool has separate memory; the pool only counts its bytes.
#pragma once

#include <cstdint>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// Count an allocation of a pool as freed.
void record_pool_free(Handle pool, std::uint64_t length_bytes);

} // namespace gdrkit::twin::cuda
