// Functions that open files below a folder.
#pragma once

#include <string>

namespace gdrkit::storage {

// Opens a relative path below a folder. Symbolic links are not followed (ELOOP), and the path must not lead above the
// folder (EXDEV) or to another file system (EXDEV). The empty path is the folder itself. Returns a descriptor or
// -errno.
int open_beneath(int folder, const std::string& path, int flags, unsigned mode);

// Same as above, name by name, for kernels without openat2 (before 5.6).
int open_beneath_by_steps(int folder, const std::string& path, int flags, unsigned mode);

} // namespace gdrkit::storage
