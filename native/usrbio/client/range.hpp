// Which memory an operation may name.
#pragma once

#include "usrbio/include/hf3fs_usrbio.h"

#include <cstdint>

namespace gdrkit::usrbio {

// Whether these bytes, which are at least one, lie in the iov and in one of its blocks. All values are the caller's,
// and nothing is assumed of them.
bool inside(const hf3fs_iov& iov, const void* memory, std::uint64_t length) noexcept;

} // namespace gdrkit::usrbio
