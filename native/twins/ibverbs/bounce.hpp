// Memory through which one thread moves the bytes of requests. It is a memfd, so that copies from and to a client's
// memory are reads and writes of a file: memory that was unmapped meanwhile gives EFAULT, never a signal. It may be
// shared with another process: what lies in it can change at any time, and is data, never looked at twice.
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
    // Memory of our own; nullptr and errno.
    static std::unique_ptr<Bounce> make(std::size_t size);
    // Memory that another process made so; nullptr and errno. EINVAL when it has another size, or could get one.
    static std::unique_ptr<Bounce> adopt(Fd fd, std::size_t size);
    ~Bounce();
    Bounce(const Bounce&) = delete;
    Bounce& operator=(const Bounce&) = delete;

    // 0 or an errno. The range at `at` lies within the buffer.
    int load(std::size_t at, const void* memory, std::size_t size);
    int store(std::size_t at, void* memory, std::size_t size) const;
    // The same for memory that is mapped as long as it is ours, so that no copy of it can fail.
    void load_mapped(std::size_t at, const std::byte* memory, std::size_t size);
    void store_mapped(std::size_t at, std::byte* memory, std::size_t size) const;

    [[nodiscard]] std::byte* at(std::size_t offset) const { return data_ + offset; }
    [[nodiscard]] int fd() const { return fd_.get(); }

private:
    Bounce(Fd fd, std::byte* data, std::size_t size) : fd_(std::move(fd)), data_(data), size_(size) {}
    static std::unique_ptr<Bounce> map(Fd fd, std::size_t size);

    Fd fd_;
    std::byte* data_;
    std::size_t size_;
};

} // namespace gdrkit::twin::verbs
