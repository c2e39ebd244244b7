// A file descriptor that is closed with its owner, and functions that open files below a folder.
#pragma once

#include <unistd.h>

#include <string>
#include <utility>

namespace gdrkit::storage {

class Descriptor {
public:
    Descriptor() = default;
    explicit Descriptor(int number) noexcept : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor() {
        if (number_ >= 0) {
            close(number_);
        }
    }
    int get() const noexcept { return number_; }
    int release() noexcept { return std::exchange(number_, -1); }
    explicit operator bool() const noexcept { return number_ >= 0; }

private:
    int number_ = -1;
};

// Opens a relative path below a folder. Symbolic links are not followed (ELOOP), and the path must not lead above the
// folder (EXDEV) or to another file system (EXDEV). The empty path is the folder itself. Returns a descriptor or
// -errno.
int open_beneath(int folder, const std::string& path, int flags, unsigned mode);

// Same as above, name by name, for kernels without openat2 (before 5.6).
int open_beneath_by_steps(int folder, const std::string& path, int flags, unsigned mode);

} // namespace gdrkit::storage
