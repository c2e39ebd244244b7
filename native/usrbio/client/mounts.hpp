// Finds the mount that contains a path or an open file.
#pragma once

#include <cstdint>
#include <string>

namespace gdrkit::usrbio {

// Finds the innermost folder that contains `path` (or is `path`) and has an agent's socket at 3fs-virt/agent.sock, and
// sets `mount` to its path. `path` must be absolute and without symbolic links. Returns false if there is no such
// folder.
bool find_agent_mount_above(std::string path, std::string& mount);
// Like find_agent_mount_above(), for the path of an open file. Also returns false if `fd` is not open.
bool find_agent_mount(int fd, std::string& mount);
// Returns true if the file system of the open file identifies itself as 3FS.
bool is_3fs_file(int fd) noexcept;

} // namespace gdrkit::usrbio
