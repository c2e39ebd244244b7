// Paths of device files, and the paths of the same files in the tree of the emulated machine (tree_files.hpp). Nothing
// here allocates memory or needs a C++ library, because devices.cpp uses it in its replacements of libc functions.
#pragma once

#include <cstddef>

namespace gdrkit::twin {

// Size of the buffer for a path in the tree. If the path of a device file in the tree needs more bytes, libc gets the
// program's path unchanged. A buffer of PATH_MAX bytes would be too large for threads with small stacks.
inline constexpr std::size_t max_path_bytes = 1024;

// A path that a program passes to a function of libc. A relative path starts at the folder of `folder_fd` or, with
// AT_FDCWD, at the current folder.
class Path {
public:
    Path(int folder_fd, const char* pathname);

    // Return the path to pass to libc. For a device file it is the path of the file in the tree, else the unchanged
    // path.
    [[nodiscard]] const char* get() const { return is_replaced_ ? tree_path_ : original_path_; }
    // Return whether the path names a port counter. Its file must be opened by open_counter.
    [[nodiscard]] bool is_counter() const { return device_index_ >= 0; }
    [[nodiscard]] int device_index() const { return device_index_; }
    [[nodiscard]] const char* get_counter_name() const { return counter_name_; }

private:
    void find_counter(const char* tree_path);

    const char* original_path_;
    bool is_replaced_ = false;
    int device_index_ = -1; // index of the NIC whose counter the path names; -1: the path names no counter
    const char* counter_name_ = nullptr;
    char tree_path_[max_path_bytes];
};

// Open a file that contains the present value of the counter. Return its descriptor, or -1 with errno set: EACCES if
// `flags` ask for writing.
int open_counter(const Path& path, int flags);

// Remove the folder of the tree from the beginning of a path, in place, and return the path. `path` may be NULL.
char* strip_tree_folder(char* path);

} // namespace gdrkit::twin
