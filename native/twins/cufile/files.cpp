// Registered files: cuFileHandleRegister and cuFileHandleDeregister.

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

constexpr std::string_view kind = "cufile_handle";
constexpr std::uint32_t tmpfs_magic = 0x01021994;
constexpr std::uint32_t ramfs_magic = 0x858458f6;

struct Files {
    std::mutex mutex;
    std::map<std::uint64_t, FileRef> registered;
};

Files& files() {
    static auto* const all = new Files;
    return *all;
}

// Return whether udev's database has the block device with a file system. The real library uses it to find the file's
// device, and registers no file without it (observed with cuFile 1.15 on an H200).
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

void check_file_system(int fd, dev_t device) {
    struct statfs found {};
    if (fstatfs(fd, &found) != 0) {
        throw CufileError{invalid_value};
    }
    const auto magic = static_cast<std::uint32_t>(found.f_type);
    if (magic == tmpfs_magic || magic == ramfs_magic || !(config().udev_knows_all_disks || is_known_to_udev(device))) {
        throw CufileError{handle_not_registered};
    }
}

Fd reopen(int fd, int flags) {
    const std::string name = "/proc/self/fd/" + std::to_string(fd);
    return Fd(open(name.c_str(), (flags & O_ACCMODE) | O_CLOEXEC));
}

FileRef inspect_file(const Description* description) {
    if (description->type != opaque_fd) {
        throw CufileError{description->type == userspace_fs ? io_not_supported : invalid_value};
    }
    auto file = std::make_shared<File>();
    struct stat found {};
    file->fd = description->handle.fd;
    const int flags = fcntl(file->fd, F_GETFL);
    if (flags < 0 || fstat(file->fd, &found) != 0) {
        throw CufileError{invalid_value};
    }
    if (!S_ISREG(found.st_mode)) {
        throw CufileError{invalid_file_type};
    }
    file->device = found.st_dev;
    file->inode = found.st_ino;
    file->direct = (flags & O_DIRECT) != 0;
    check_file_system(file->fd, file->device);
    file->reopened = reopen(file->fd, flags);
    if (!file->reopened) {
        throw CufileError{internal_error};
    }
    return file;
}

void register_new(FileHandle* handle, FileRef file) {
    Files& all = files();
    std::lock_guard lock(all.mutex);
    for (const auto& [other, registered] : all.registered) {
        if (registered->fd == file->fd) {
            throw CufileError{handle_already_registered};
        }
    }
    // A non-canonical address: dereferencing the handle faults.
    const std::uint64_t number = random_u64() >> 2 | std::uint64_t{1} << 62;
    ledger_add(kind, number);
    all.registered.emplace(number, std::move(file));
    *handle = reinterpret_cast<FileHandle>(number);
}

} // namespace

FileRef find_file(FileHandle handle) {
    FileRef file;
    {
        Files& all = files();
        std::lock_guard lock(all.mutex);
        const auto found = all.registered.find(reinterpret_cast<std::uint64_t>(handle));
        if (found == all.registered.end()) {
            throw CufileError{handle_not_registered};
        }
        file = found->second;
    }
    // The descriptor may have been closed and its number reused for another file.
    struct stat now {};
    const bool is_same_file = fstat(file->fd, &now) == 0 && now.st_dev == file->device && now.st_ino == file->inode;
    return is_same_file ? file : nullptr;
}

void drop_files() {
    Files& all = files();
    std::lock_guard lock(all.mutex);
    for (const auto& [number, file] : all.registered) {
        static_cast<void>(ledger_remove(kind, number));
    }
    all.registered.clear();
}

GDRKIT_CUFILE_ENTRY Error cuFileHandleRegister(FileHandle* handle, Description* description) {
    const Error result = entry("cuFileHandleRegister", [&] {
        if (handle == nullptr || description == nullptr) {
            throw CufileError{invalid_value};
        }
        ensure_open();
        register_new(handle, inspect_file(description));
    });
    count_operation(&StatsLevel1::handle_register_ops, result.error == success);
    return result;
}

GDRKIT_CUFILE_ENTRY void cuFileHandleDeregister(FileHandle handle) {
    const auto number = reinterpret_cast<std::uint64_t>(handle);
    FileRef file;
    Files& all = files();
    std::lock_guard lock(all.mutex);
    // This function cannot report an error, so an invalid handle ends the process, like a double release.
    if (!ledger_remove(kind, number)) {
        std::fprintf(stderr, "gdrkit twin: cuFileHandleDeregister(%p): not a file handle, or already deregistered\n",
                     handle);
        std::abort();
    }
    all.registered.erase(number);
    count_operation(&StatsLevel1::handle_deregister_ops, true);
}

} // namespace gdrkit::twin::cufile
