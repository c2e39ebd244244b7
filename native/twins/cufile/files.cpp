// Implements cuFileHandleRegister and cuFileHandleDeregister, and the table of registered files.

#include "cufile/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

#include "cufile/driver.hpp"
#include "cufile/entry.hpp"
#include "cufile/statistics.hpp"
#include "model/config.hpp"
#include "model/ledger.hpp"

namespace gdrkit::twin::cufile {
namespace {

// Type of file handles in the ledger of live handles (model/ledger.hpp).
constexpr std::string_view handle_ledger_kind = "cufile_handle";
// Values of statfs::f_type: TMPFS_MAGIC and RAMFS_MAGIC.
constexpr std::uint32_t tmpfs_magic = 0x01021994;
constexpr std::uint32_t ramfs_magic = 0x858458f6;

struct Files {
    std::mutex mutex;
    std::map<std::uint64_t, FileRef> file_by_handle;
};

Files& files() {
    static auto* const instance = new Files;
    return *instance;
}

// Return whether udev's database describes the block device as a device with a file system. The real library does not
// register a file whose device has no entry there (observed with cuFile 1.15 on an H200).
bool is_known_to_udev(dev_t device) {
    const std::string path = "/run/udev/data/b" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (line == "E:ID_FS_USAGE=filesystem") {
            return true;
        }
    }
    return false;
}

// Throw CufileError (handle_not_registered) if the real library does not register files on this file system or device.
void check_file_system(int fd, dev_t device) {
    struct statfs file_system {};
    if (fstatfs(fd, &file_system) != 0) {
        throw CufileError{invalid_value};
    }
    const auto magic = static_cast<std::uint32_t>(file_system.f_type);
    if (magic == tmpfs_magic || magic == ramfs_magic || !(config().udev_knows_all_disks || is_known_to_udev(device))) {
        throw CufileError{handle_not_registered};
    }
}

// Open the same file again with the access mode of `flags`, but without O_DIRECT.
Fd reopen(int fd, int flags) {
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    return Fd(open(path.c_str(), (flags & O_ACCMODE) | O_CLOEXEC));
}

// Check the file that a program wants to register, and return its entry for the table.
FileRef inspect_file(const Description* description) {
    if (description->type != opaque_fd) {
        throw CufileError{description->type == userspace_fs ? io_not_supported : invalid_value};
    }
    auto file = std::make_shared<File>();
    struct stat file_status {};
    file->fd = description->handle.fd;
    const int flags = fcntl(file->fd, F_GETFL);
    if (flags < 0 || fstat(file->fd, &file_status) != 0) {
        throw CufileError{invalid_value};
    }
    if (!S_ISREG(file_status.st_mode)) {
        throw CufileError{invalid_file_type};
    }
    file->device = file_status.st_dev;
    file->inode = file_status.st_ino;
    file->is_direct = (flags & O_DIRECT) != 0;
    check_file_system(file->fd, file->device);
    file->buffered_fd = reopen(file->fd, flags);
    if (!file->buffered_fd) {
        throw CufileError{internal_error};
    }
    return file;
}

void add_registration(FileHandle* handle, FileRef file) {
    Files& file_table = files();
    std::lock_guard lock(file_table.mutex);
    for (const auto& [registered_handle, registered_file] : file_table.file_by_handle) {
        if (registered_file->fd == file->fd) {
            throw CufileError{handle_already_registered};
        }
    }
    // The handle is a random non-canonical address, so that dereferencing the handle faults.
    const std::uint64_t handle_value = random_u64() >> 2 | std::uint64_t{1} << 62;
    record_open_handle(handle_ledger_kind, handle_value);
    file_table.file_by_handle.emplace(handle_value, std::move(file));
    *handle = reinterpret_cast<FileHandle>(handle_value);
}

} // namespace

FileRef find_file(FileHandle handle) {
    FileRef file;
    {
        Files& file_table = files();
        std::lock_guard lock(file_table.mutex);
        const auto entry = file_table.file_by_handle.find(reinterpret_cast<std::uint64_t>(handle));
        if (entry == file_table.file_by_handle.end()) {
            throw CufileError{handle_not_registered};
        }
        file = entry->second;
    }
    // The descriptor may have been closed and its number reused for another file.
    struct stat file_status {};
    const bool is_same_file =
        fstat(file->fd, &file_status) == 0 && file_status.st_dev == file->device && file_status.st_ino == file->inode;
    return is_same_file ? file : nullptr;
}

void drop_files() {
    Files& file_table = files();
    std::lock_guard lock(file_table.mutex);
    for (const auto& [handle_value, file] : file_table.file_by_handle) {
        static_cast<void>(record_closed_handle(handle_ledger_kind, handle_value));
    }
    file_table.file_by_handle.clear();
}

GDRKIT_CUFILE_ENTRY Error cuFileHandleRegister(FileHandle* handle, Description* description) {
    const Error result = run_entry("cuFileHandleRegister", [&] {
        if (handle == nullptr || description == nullptr) {
            throw CufileError{invalid_value};
        }
        ensure_open();
        add_registration(handle, inspect_file(description));
    });
    count_operation(&StatsLevel1::handle_register_ops, result.error == success);
    return result;
}

GDRKIT_CUFILE_ENTRY void cuFileHandleDeregister(FileHandle handle) {
    const auto handle_value = reinterpret_cast<std::uint64_t>(handle);
    Files& file_table = files();
    std::lock_guard lock(file_table.mutex);
    // This function cannot report an error, so an invalid handle ends the process, like a double release.
    if (!record_closed_handle(handle_ledger_kind, handle_value)) {
        std::fprintf(stderr, "gdrkit twin: cuFileHandleDeregister(%p): not a file handle, or already deregistered\n",
                     handle);
        std::abort();
    }
    file_table.file_by_handle.erase(handle_value);
    count_operation(&StatsLevel1::handle_deregister_ops, true);
}

} // namespace gdrkit::twin::cufile
