// Opens a file below a folder by openat2(2), or step by step on kernels without it.
#include "storage/open_beneath.hpp"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cerrno>
#include <utility>

#include "common/descriptor.hpp"

namespace gdrkit::storage {

namespace {

bool are_on_same_device(int first_fd, int second_fd) {
    struct stat first_stat {
    }, second_stat{};
    return fstat(first_fd, &first_stat) == 0 && fstat(second_fd, &second_stat) == 0 &&
           first_stat.st_dev == second_stat.st_dev;
}

// If the file is on the file system of the folder, releases the descriptor and returns its number. Otherwise returns
// -EXDEV, and `descriptor` still owns and closes the file.
int release_if_on_same_device(int folder_fd, Descriptor&& descriptor) {
    return are_on_same_device(folder_fd, descriptor.get()) ? descriptor.release() : -EXDEV;
}

} // namespace

int open_beneath_by_component(int folder_fd, const std::string& path, int flags, unsigned mode) {
    if (!path.empty() && path.front() == '/') {
        return -EXDEV;
    }
    Descriptor current_folder(openat(folder_fd, ".", O_PATH | O_DIRECTORY | O_CLOEXEC));
    std::size_t name_begin = 0;
    while (current_folder) {
        const std::size_t name_end = path.find('/', name_begin);
        const std::string name =
            path.substr(name_begin, name_end == std::string::npos ? name_end : name_end - name_begin);
        if (name == "..") {
            return -EXDEV;
        }
        if (name_end == std::string::npos || path.find_first_not_of('/', name_end) == std::string::npos) {
            // A path that ends with '/' must be a folder.
            const int folder_flag = name_end == std::string::npos ? 0 : O_DIRECTORY;
            Descriptor descriptor(openat(current_folder.get(), name.empty() ? "." : name.c_str(),
                                         flags | folder_flag | O_NOFOLLOW | O_CLOEXEC, static_cast<mode_t>(mode)));
            return descriptor ? release_if_on_same_device(folder_fd, std::move(descriptor)) : -errno;
        }
        if (!name.empty()) {
            // O_PATH with O_NOFOLLOW alone would open a symbolic link itself. With O_DIRECTORY, openat() fails instead.
            Descriptor next_folder(
                openat(current_folder.get(), name.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
            if (!next_folder) {
                const int open_errno = errno;
                struct stat entry_stat {};
                const bool is_link =
                    fstatat(current_folder.get(), name.c_str(), &entry_stat, AT_SYMLINK_NOFOLLOW) == 0 &&
                    S_ISLNK(entry_stat.st_mode);
                return is_link ? -ELOOP : -open_errno;
            }
            current_folder = std::move(next_folder);
        }
        name_begin = name_end + 1;
    }
    return -errno; // The folder itself could not be opened.
}

int open_beneath(int folder_fd, const std::string& path, int flags, unsigned mode) {
    open_how how{};
    how.flags = static_cast<unsigned>(flags) | O_CLOEXEC;
    how.mode = (flags & O_CREAT) != 0 ? mode : 0;
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV;
    for (int retries_count = 0;; ++retries_count) {
        const long descriptor = syscall(SYS_openat2, folder_fd, path.empty() ? "." : path.c_str(), &how, sizeof how);
        if (descriptor >= 0) {
            return static_cast<int>(descriptor);
        }
        if (errno == ENOSYS || errno == EPERM) {
            // ENOSYS means that the kernel has no openat2. EPERM may come from a container whose seccomp filter does
            // not know openat2. If the file system returned EPERM, open_beneath_by_component() fails with EPERM, too.
            return open_beneath_by_component(folder_fd, path, flags, mode);
        }
        // EAGAIN means that another process renamed a folder meanwhile, so the kernel could not check the path. Try
        // again, at most 64 times.
        if (errno != EINTR && (errno != EAGAIN || retries_count == 64)) {
            return -errno;
        }
    }
}

} // namespace gdrkit::storage
