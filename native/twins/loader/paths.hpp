// Paths of device files, and the paths of the same files in the tree of the domain (tree_files.hpp). Nothing here
// allocates memory or needs a C++ library, because devices.cpp uses it in its replacements of libc functions.
#pragma once

#include <cstddef>

namespace gdrkit::twin {

// A longer path does not name a device file. A buffer of PATH_MAX would be too large for threads with small stacks.
inline constexpr std::size_t max_path_bytes = 1024;

// A path that a program passes to a function of libc, relative to a folder's descriptor or AT_FDCWD.
class Path {
public:
    Path(int folder, const char* file);

    // Return the path to pass to libc. For a device file it is the path of the file in the tree, else the unchanged
    // path.
    [[nodiscard]] const char* get() const { return is_replaced_ ? tree_path_ : file_; }
    // Return whether the path names a port counter. Its file must be opened by open_counter.
    [[nodiscard]] bool is_counter() const { return device_ >= 0; }
    [[nodiscard]] int device() const { return device_; }
    [[nodiscard]] const char* get_counter_name() const { return counter_name_; }

private:
    void find_counter(const char* tree_path);

    const char* file_;
    bool is_replaced_ = false;
    int device_ = -1;
    const char* counter_name_ = nullptr;
    char tree_path_[max_path_bytes];
};

// Open a file that contains the present value of the counter. Fails like open, with EACCES if `flags` ask for writing.
int open_counter(const Path& path, int flags);

// Remove the prefix of the tree from a path in place and return the path. `path` may be NULL.
char* strip_tree_folder(char* path);

} // namespace gdrkit::twin
