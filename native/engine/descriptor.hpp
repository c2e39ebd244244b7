// A file descriptor that is closed with its owner.
#pragma once

#include <unistd.h>

#include <utility>

namespace gdrkit::engine {

class Descriptor {
public:
    Descriptor() = default;
    explicit Descriptor(int number) noexcept : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor() { reset(); }
    void reset() noexcept {
        if (number_ >= 0) {
            close(std::exchange(number_, -1));
        }
    }
    int get() const noexcept { return number_; }
    explicit operator bool() const noexcept { return number_ >= 0; }

private:
    int number_ = -1;
};

} // namespace gdrkit::engine
