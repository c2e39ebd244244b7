// The CUDA driver for the engine: its functions, and the conversion of its results to exceptions.
#pragma once

#include "common/cuda_driver.hpp"
#include "engine/failure.hpp"

namespace gdrkit::engine::cuda {

using namespace gdrkit::cuda;

// Returns the initialized driver of this process. Throws Error with ENOENT if dlopen fails, with ENOSYS if a
// function is missing, or with the result of cuInit. A failure is not cached, because a driver may be installed later.
const Driver& driver();

// Returns the description of a failed driver call, with the name of its result (CUDA_ERROR_..., or "unknown").
Failure make_failure(const char* operation, Result result);

// Throws Error unless `result` is success.
void check(const char* operation, Result result);

} // namespace gdrkit::engine::cuda
