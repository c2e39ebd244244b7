// The CUDA driver of the client library: loads libcuda once, and converts its errors to negative errno values.
#pragma once

#include "common/cuda_driver.hpp"

namespace gdrkit::usrbio::cuda {

using namespace gdrkit::cuda;

// Returns the initialized driver of this process. Returns null if libcuda.so.1 is not installed or cannot be
// initialized, or if this library was built without ENABLE_GDR. The result never changes, and the first call logs the
// reason for null.
const Driver* driver() noexcept;

// Converts a result of the driver to -ENOMEM, -ENODEV, -ENOTSUP or -EIO; 0 for success.
int convert_to_errno(Result result) noexcept;

} // namespace gdrkit::usrbio::cuda
