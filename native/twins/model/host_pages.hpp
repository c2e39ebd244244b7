// A check whether host memory could be pinned. The twins call it where a real driver would pin the pages of the memory
// that a client registers.
#pragma once

#include <cstdint>

namespace gdrkit::twin {

// Return 0, or EFAULT if a page of [begin, end) is not mapped, not readable or, with `must_be_writable`, not writable.
// Pages that were never touched are populated, as pinning does.
int check_mapped(std::uint64_t begin, std::uint64_t end, bool must_be_writable);

} // namespace gdrkit::twin
