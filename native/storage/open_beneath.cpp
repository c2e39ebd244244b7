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

bool is_same_device(int first_fd, int second_fd) {
    struct stat first_info {
    }, second_info{};
    return fstat(first_fd, &first_info) == 0 && fstat(second_fd, &second_info) == 0 &&
           first_info.st_dev == second_info.st_dev;
}

// Returns the descriptor if it is on the file system of the folder, or closes it and returns -EXDEV.
int refuse_other_device(int folder, Descriptor&& descriptor) {
    return is_same_device(folder, descriptor.get()) ? descriptor.release() : -EXDEV;
}

} // namespace

int open_beneath_by_steps(int folder, const std::string& path, int flags, unsigned mode) {
    if (!path.empty() && path.front() == '/') {
        return -EXDEV;
    }
    Descriptor current(openat(folder, ".", O_PATH | O_DIRECTORY | O_CLOEXEC));
    std::size_t begin = 0;
    while (current) {
        const std::size_t end = path.find('/', begin);
        const std::string name = path.substr(begin, end == std::string::npos ? end : end - begin);
        if (name == "..") {
            return -EXDEV;
        }
        if (end == std::string::npos || path.find_first_not_of('/', end) == std::string::npos) {
            const int folder_flag = end == std::string::npos ? 0 : O_DIRECTORY;
            Descriptor descriptor(openat(current.get(), name.empty() ? "." : name.c_str(),
                                         flags | folder_flag | O_NOFOLLOW | O_CLOEXEC, static_cast<mode_t>(mode)));
            return descriptor ? refuse_other_device(folder, std::move(descriptor)) : -errno;
        }
        if (!name.empty()) {
            // O_PATH with O_NOFOLLOW would open a symbolic link itself. O_DIRECTORY makes this fail.
            Descriptor next(openat(current.get(), name.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
            if (!next) {
                const int open_errno = errno;
                struct stat info {};
                const bool is_link =
                    fstatat(current.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
                return is_link ? -ELOOP : -open_errno;
            }
            current = std::move(next);
        }
        begin = end + 1;
    }
    return -errno;
}

int open_beneath(int folder, const std::string& path, int flags, unsigned mode) {
    open_how how{};
    how.flags = static_cast<unsigned>(flags) | O_CLOEXEC;
    how.mode = (flags & O_CREAT) != 0 ? mode : 0;
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV;
    for (int tries = 0;; ++tries) {
        const long descriptor = syscall(SYS_openat2, folder, path.empty() ? "." : path.c_str(), &how, sizeof how);
        if (descriptor >= 0) {
            return static_cast<int>(descriptor);
        }
        if (errno == ENOSYS || errno == EPERM) {
            // EPERM may come from a container whose seccomp filter does not know openat2. If the file system returned
            // EPERM, open_beneath_by_steps() fails with EPERM, too.
            return open_beneath_by_steps(folder, path, flags, mode);
        }
        // EAGAIN means that another process renamed a folder meanwhile, so the kernel could not check the path.
        if (errno != EINTR && (errno != EAGAIN || tries == 64)) {
            return -errno;
        }
    }
}

} // namespace gdrkit::storage
