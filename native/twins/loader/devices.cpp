// A library for LD_PRELOAD, by which programs see the devices of the verbs twin in /sys and /dev. Each function here
// replaces the function of libc with the same name. If the path argument names a device file, the function passes the
// path of the same file in the tree to libc. The tree is a folder with the files of all devices of the emulated
// machine. `gdrkit run` creates the tree, and sets LD_PRELOAD and GDRKIT_TWINS_STATE for its child. The library needs
// only libc, so it adds little to the start of a process.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "loader/paths.hpp"

using gdrkit::twin::open_counter;
using gdrkit::twin::Path;
using gdrkit::twin::strip_tree_folder;

namespace {

// Return the definition of a function that follows the definition in this library in the search order of the loader:
// the definition in libc. Several threads may fill `cache` at once.
void* find_next_definition(const char* name, void** cache) {
    void* function = __atomic_load_n(cache, __ATOMIC_RELAXED);
    if (function == nullptr) {
        function = dlsym(RTLD_NEXT, name);
        __atomic_store_n(cache, function, __ATOMIC_RELAXED);
    }
    return function;
}

// A call has a mode argument only if its flags can create a file.
mode_t get_mode_argument(int flags, va_list arguments) {
    return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

} // namespace

// Define `next` as the definition in libc of the function `name` of the given type. If libc has none, return an error.
#define NEXT(name, ...)                                                                                                \
    static void* cache_##name = nullptr;                                                                               \
    using Type_##name = __VA_ARGS__;                                                                                   \
    const auto next = reinterpret_cast<Type_##name*>(find_next_definition(#name, &cache_##name));                      \
    if (next == nullptr) {                                                                                             \
        return fail<Type_##name>();                                                                                    \
    }

namespace {

// fail<Function>() sets ENOSYS and returns the error result of a function that this libc does not have.
template <typename Function> struct ResultOf;
template <typename Result, typename... Arguments> struct ResultOf<Result(Arguments...)> { using Type = Result; };
template <typename Result, typename... Arguments> struct ResultOf<Result(Arguments..., ...)> { using Type = Result; };
template <typename Function> typename ResultOf<Function>::Type fail() {
    errno = ENOSYS;
    if constexpr (requires(typename ResultOf<Function>::Type value) { *value; }) {
        return nullptr;
    } else {
        return -1;
    }
}

} // namespace

#pragma GCC visibility push(default)
extern "C" {

#define OPEN(name)                                                                                                     \
    int name(const char* pathname, int flags, ...) {                                                                   \
        va_list arguments;                                                                                             \
        va_start(arguments, flags);                                                                                    \
        const mode_t mode = get_mode_argument(flags, arguments);                                                       \
        va_end(arguments);                                                                                             \
        const Path path(AT_FDCWD, pathname);                                                                           \
        if (path.is_counter()) {                                                                                       \
            return open_counter(path, flags);                                                                          \
        }                                                                                                              \
        NEXT(name, int(const char*, int, ...))                                                                         \
        return next(path.get(), flags, mode);                                                                          \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int folder_fd, const char* pathname, int flags, ...) {                                                    \
        va_list arguments;                                                                                             \
        va_start(arguments, flags);                                                                                    \
        const mode_t mode = get_mode_argument(flags, arguments);                                                       \
        va_end(arguments);                                                                                             \
        const Path path(folder_fd, pathname);                                                                          \
        if (path.is_counter()) {                                                                                       \
            return open_counter(path, flags);                                                                          \
        }                                                                                                              \
        NEXT(name, int(int, const char*, int, ...))                                                                    \
        return next(folder_fd, path.get(), flags, mode);                                                               \
    }
OPENAT(openat)
OPENAT(openat64)

// A program that was compiled with _FORTIFY_SOURCE calls these functions instead of open and openat.
#define OPEN_2(name)                                                                                                   \
    int name(const char* pathname, int flags) {                                                                        \
        const Path path(AT_FDCWD, pathname);                                                                           \
        if (path.is_counter()) {                                                                                       \
            return open_counter(path, flags);                                                                          \
        }                                                                                                              \
        NEXT(name, int(const char*, int))                                                                              \
        return next(path.get(), flags);                                                                                \
    }
OPEN_2(__open_2)
OPEN_2(__open64_2)

#define OPENAT_2(name)                                                                                                 \
    int name(int folder_fd, const char* pathname, int flags) {                                                         \
        const Path path(folder_fd, pathname);                                                                          \
        if (path.is_counter()) {                                                                                       \
            return open_counter(path, flags);                                                                          \
        }                                                                                                              \
        NEXT(name, int(int, const char*, int))                                                                         \
        return next(folder_fd, path.get(), flags);                                                                     \
    }
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)

#define FOPEN(name)                                                                                                    \
    FILE* name(const char* pathname, const char* mode) {                                                               \
        const Path path(AT_FDCWD, pathname);                                                                           \
        if (path.is_counter()) {                                                                                       \
            const int fd = open_counter(path, std::strpbrk(mode, "wa+") == nullptr ? O_RDONLY : O_RDWR);               \
            return fd < 0 ? nullptr : fdopen(fd, "r");                                                                 \
        }                                                                                                              \
        NEXT(name, FILE*(const char*, const char*))                                                                    \
        return next(path.get(), mode);                                                                                 \
    }
FOPEN(fopen)
FOPEN(fopen64)

DIR* opendir(const char* pathname) {
    const Path path(AT_FDCWD, pathname);
    NEXT(opendir, DIR * (const char*))
    return next(path.get());
}

using Filter = int(const dirent*);
using Order = int(const dirent**, const dirent**);
#define SCANDIR(name)                                                                                                  \
    int name(const char* pathname, dirent*** entries, Filter* filter, Order* order) {                                  \
        const Path path(AT_FDCWD, pathname);                                                                           \
        NEXT(name, int(const char*, dirent***, Filter*, Order*))                                                       \
        return next(path.get(), entries, filter, order);                                                               \
    }
SCANDIR(scandir)

#define ACCESS(name)                                                                                                   \
    int name(const char* pathname, int mode) noexcept {                                                                \
        const Path path(AT_FDCWD, pathname);                                                                           \
        NEXT(name, int(const char*, int))                                                                              \
        return next(path.get(), mode);                                                                                 \
    }
ACCESS(access)
ACCESS(eaccess)
ACCESS(euidaccess)

int faccessat(int folder_fd, const char* pathname, int mode, int flags) noexcept {
    const Path path(folder_fd, pathname);
    NEXT(faccessat, int(int, const char*, int, int))
    return next(folder_fd, path.get(), mode, flags);
}

int chdir(const char* pathname) noexcept {
    const Path path(AT_FDCWD, pathname);
    NEXT(chdir, int(const char*))
    return next(path.get());
}

#define STAT(name, Status)                                                                                             \
    int name(const char* pathname, Status* status) noexcept {                                                          \
        const Path path(AT_FDCWD, pathname);                                                                           \
        NEXT(name, int(const char*, Status*))                                                                          \
        return next(path.get(), status);                                                                               \
    }
STAT(stat, struct stat)
STAT(stat64, struct stat64)
STAT(lstat, struct stat)
STAT(lstat64, struct stat64)
STAT(statfs, struct statfs)
STAT(statfs64, struct statfs64)

#define FSTATAT(name, Status)                                                                                          \
    int name(int folder_fd, const char* pathname, Status* status, int flags) noexcept {                                \
        const Path path(folder_fd, pathname);                                                                          \
        NEXT(name, int(int, const char*, Status*, int))                                                                \
        return next(folder_fd, path.get(), status, flags);                                                             \
    }
FSTATAT(fstatat, struct stat)
FSTATAT(fstatat64, struct stat64)

int statx(int folder_fd, const char* pathname, int flags, unsigned mask, struct statx* status) noexcept {
    const Path path(folder_fd, pathname);
    NEXT(statx, int(int, const char*, int, unsigned, struct statx*))
    return next(folder_fd, path.get(), flags, mask, status);
}

// Programs that were linked against a glibc before 2.33 call these functions instead of stat, lstat and fstatat.
#define XSTAT(name, Status)                                                                                            \
    int name(int version, const char* pathname, Status* status) noexcept {                                             \
        const Path path(AT_FDCWD, pathname);                                                                           \
        NEXT(name, int(int, const char*, Status*))                                                                     \
        return next(version, path.get(), status);                                                                      \
    }
XSTAT(__xstat, struct stat)
XSTAT(__xstat64, struct stat64)
XSTAT(__lxstat, struct stat)
XSTAT(__lxstat64, struct stat64)

#define FXSTATAT(name, Status)                                                                                         \
    int name(int version, int folder_fd, const char* pathname, Status* status, int flags) noexcept {                   \
        const Path path(folder_fd, pathname);                                                                          \
        NEXT(name, int(int, int, const char*, Status*, int))                                                           \
        return next(version, folder_fd, path.get(), status, flags);                                                    \
    }
FXSTATAT(__fxstatat, struct stat)
FXSTATAT(__fxstatat64, struct stat64)

// `ls -l` and `cp` read extended attributes of device files with these functions.
#define GETXATTR(name)                                                                                                 \
    ssize_t name(const char* pathname, const char* attribute, void* value, size_t size) noexcept {                     \
        const Path path(AT_FDCWD, pathname);                                                                           \
        NEXT(name, ssize_t(const char*, const char*, void*, size_t))                                                   \
        return next(path.get(), attribute, value, size);                                                               \
    }
GETXATTR(getxattr)
GETXATTR(lgetxattr)

ssize_t readlink(const char* pathname, char* target, size_t size) noexcept {
    const Path path(AT_FDCWD, pathname);
    NEXT(readlink, ssize_t(const char*, char*, size_t))
    return next(path.get(), target, size);
}

ssize_t readlinkat(int folder_fd, const char* pathname, char* target, size_t size) noexcept {
    const Path path(folder_fd, pathname);
    NEXT(readlinkat, ssize_t(int, const char*, char*, size_t))
    return next(folder_fd, path.get(), target, size);
}

ssize_t __readlink_chk(const char* pathname, char* target, size_t size, size_t target_size) noexcept {
    const Path path(AT_FDCWD, pathname);
    NEXT(__readlink_chk, ssize_t(const char*, char*, size_t, size_t))
    return next(path.get(), target, size, target_size);
}

ssize_t __readlinkat_chk(int folder_fd, const char* pathname, char* target, size_t size, size_t target_size) noexcept {
    const Path path(folder_fd, pathname);
    NEXT(__readlinkat_chk, ssize_t(int, const char*, char*, size_t, size_t))
    return next(folder_fd, path.get(), target, size, target_size);
}

// The result of these functions is a path without symbolic links. A path in the tree becomes the path that the program
// knows.
char* realpath(const char* pathname, char* resolved) noexcept {
    const Path path(AT_FDCWD, pathname);
    NEXT(realpath, char*(const char*, char*))
    return strip_tree_folder(next(path.get(), resolved));
}

char* __realpath_chk(const char* pathname, char* resolved, size_t size) noexcept {
    const Path path(AT_FDCWD, pathname);
    NEXT(__realpath_chk, char*(const char*, char*, size_t))
    return strip_tree_folder(next(path.get(), resolved, size));
}

char* canonicalize_file_name(const char* pathname) noexcept {
    const Path path(AT_FDCWD, pathname);
    NEXT(canonicalize_file_name, char*(const char*))
    return strip_tree_folder(next(path.get()));
}

char* getcwd(char* buffer, size_t size) noexcept {
    NEXT(getcwd, char*(char*, size_t))
    return strip_tree_folder(next(buffer, size));
}

} // extern "C"
#pragma GCC visibility pop
