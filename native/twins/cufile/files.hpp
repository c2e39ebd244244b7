// The table of registered files.
#pragma once

#include <sys/types.h>

#include <memory>

#include "cufile/cufile_abi.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin::cufile {

struct File {
    int fd = -1;      // descriptor of the program, which the program may close
    dev_t device = 0; // device and inode tell whether `fd` still refers to the registered file
    ino_t inode = 0;
    bool is_direct = false; // `fd` was opened with O_DIRECT
    Fd buffered_fd;         // the same file without O_DIRECT, so that transfers need no alignment
};
using FileRef = std::shared_ptr<const File>;

// Find a registered file. Return nullptr if the caller's descriptor no longer refers to that file. Throw CufileError
// (handle_not_registered) for an invalid handle.
FileRef find_file(FileHandle handle);
// Drop all registrations. cuFileDriverClose calls this function.
void drop_files();

} // namespace gdrkit::twin::cufile
