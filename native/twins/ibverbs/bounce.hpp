// A buffer through which one thread moves the bytes of requests. Its memory is a memfd, so that copies from and to a
// client's memory are reads and writes of a file: memory that was unmapped meanwhile gives EFAULT, never a signal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "model/rendezvous.hpp"

namespace gdrkit::twin::verbs {

// Requests move in pieces of this size.
inline constexpr std::size_t chunk_bytes_most = 256U << 10;

class Bounce {
public:
    // nullptr and errno.
    static std::unique_ptr<Bounce> make();
    ~Bounce();
    Bounce(const Bounce&) = delete;
    Bounce& operator=(const Bounce&) = delete;

    // 0 or an errno. The range at `at` lies within the buffer.
    int load(std::size_t at, const void* memory, std::size_t size);
    int store(std::size_t at, void* memory, std::size_t size) const;

    [[nodiscard]] std::byte* at(std::size_t offset) const { return data_ + offset; }

private:
    Bounce(Fd fd, std::byte* data) : fd_(std::move(fd)), data_(data) {}

    Fd fd_;
    std::byte* data_;
};

} // namespace gdrkit::twin::verbs
