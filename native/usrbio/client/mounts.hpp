// Which mount a path or an open file belongs to.
#pragma once

#include <cstdint>
#include <string>

namespace gdrkit::usrbio {

// The innermost folder above `path` (absolute, without links) that has an agent's socket. false: there is none.
bool agent_mount_above(std::string path, std::string& mount);
// The same for an open file. false too when fd is none.
bool agent_mount_of(int fd, std::string& mount);
// Does the file system of the open file say that it is 3FS?
bool answers_as_3fs(int fd) noexcept;

} // namespace gdrkit::usrbio
