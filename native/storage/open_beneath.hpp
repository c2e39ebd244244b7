// Functions that open a file below a folder, for paths that an untrusted client of the storage service sends.
#pragma once

#include <string>

namespace gdrkit::storage {

// Opens a relative path below a folder. Symbolic links are not followed (ELOOP), and the path must not lead above the
// folder (EXDEV) or to another file system (EXDEV). The empty path is the folder itself. Returns a descriptor or
// -errno.
int open_beneath(int folder_fd, const std::string& path, int flags, unsigned mode);

// Does the same for kernels without openat2(2) (before 5.6): opens one folder of the path after the other. Refuses
// every ".." (EXDEV), also if the path stays below the folder.
int open_beneath_by_component(int folder_fd, const std::string& path, int flags, unsigned mode);

} // namespace gdrkit::storage
