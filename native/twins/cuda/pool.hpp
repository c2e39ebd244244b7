// Memory pools. Each allocation of a pool is memory of its own; the pool keeps the account.
#pragma once

#include <cstdint>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

void note_pool_free(Handle pool, std::uint64_t length_bytes);

} // namespace gdrkit::twin::cuda
