// The files that are registered.
#pragma once

#include <sys/types.h>

#include <memory>

#include "cufile/cufile_abi.hpp"
#include "model/rendezvous.hpp"

namespace gdrkit::twin::cufile {

struct File {
    int fd = -1; // the caller's
    dev_t device = 0;
    ino_t inode = 0;
    bool direct = false; // opened with O_DIRECT
    Fd own;              // the same file, opened again without O_DIRECT, since bytes move by the host here
};
using FileRef = std::shared_ptr<const File>;

// Throws Refused (handle_not_registered) for what is none; nullptr when the caller's descriptor is no longer that file.
FileRef find_file(FileHandle handle);
// The driver was closed.
void forget_files();

} // namespace gdrkit::twin::cufile
