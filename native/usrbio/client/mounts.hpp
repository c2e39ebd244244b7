// Finds the mount of a path or of an open file.
#pragma once

#include <cstdint>
#include <string>

namespace gdrkit::usrbio {

// Finds the innermost folder above `path` (absolute, without links) that has an agent's socket. Returns false if there
// is none.
bool find_agent_mount_above(std::string path, std::string& mount);
// Same for an open file. Returns false also if fd is not open.
bool find_agent_mount(int fd, std::string& mount);
// Returns true if the file system of the open file identifies itself as 3FS.
bool is_3fs_file(int fd) noexcept;

} // namespace gdrkit::usrbio
