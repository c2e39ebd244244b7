// The check of the memory of an operation.
#pragma once

#include "usrbio/include/hf3fs_usrbio.h"

#include <cstdint>

namespace gdrkit::usrbio {

// Returns true if these bytes, at least one, are in the iov and in one of its blocks. All values are from the caller
// and may be invalid.
bool is_inside(const hf3fs_iov& iov, const void* memory, std::uint64_t length) noexcept;

} // namespace gdrkit::usrbio
