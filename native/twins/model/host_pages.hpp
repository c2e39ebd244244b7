// Memory of this process, as a kernel driver that pins its pages finds it.
#pragma once

#include <cstdint>

namespace gdrkit::twin {

// 0, or EFAULT where not all of the pages [begin, end) are mapped and may be read, and written when `writable`. Pages
// that were never touched are there afterwards, as pinning makes them.
int check_mapped(std::uint64_t begin, std::uint64_t end, bool writable);

} // namespace gdrkit::twin
