// The buffer through which payload moves between client memory and a peer. Client memory is the memory of the
// application that uses the twin. The buffer is a memfd, so a copy from or to client memory is a system call on a file.
// If the client has unmapped the memory since its registration, the call fails with EFAULT and raises no signal.
// Another process may share the buffer and change it at any time, so the payload in it is only copied and never
// interpreted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "model/sockets.hpp"

namespace gdrkit::twin::verbs {

// Largest size of a chunk. A message moves as a sequence of chunks.
inline constexpr std::size_t max_chunk_bytes = 256U << 10;

class BounceBuffer {
public:
    // Create a buffer. Return nullptr and set errno on failure.
    static std::unique_ptr<BounceBuffer> make(std::size_t size_bytes);
    // Map a buffer that another process created. Return nullptr and set errno on failure; EINVAL if the size of the
    // memfd is not `size_bytes`, or if it is not sealed against changes of its size.
    static std::unique_ptr<BounceBuffer> adopt(Fd fd, std::size_t size_bytes);
    ~BounceBuffer();
    BounceBuffer(const BounceBuffer&) = delete;
    BounceBuffer& operator=(const BounceBuffer&) = delete;

    // Copy from client memory into the buffer, or out of the buffer into client memory. Return 0 or an errno. The
    // caller ensures that [offset, offset + size_bytes) lies within the buffer.
    int copy_in(std::size_t offset, const void* client_memory, std::size_t size_bytes);
    int copy_out(std::size_t offset, void* client_memory, std::size_t size_bytes) const;
    // Like copy_in and copy_out, but for memory that the twin has mapped from a sealed memfd. These copies cannot fail.
    void copy_in_mapped(std::size_t offset, const std::byte* memory, std::size_t size_bytes);
    void copy_out_mapped(std::size_t offset, std::byte* memory, std::size_t size_bytes) const;

    [[nodiscard]] std::byte* data_at(std::size_t offset) const { return data_ + offset; }
    [[nodiscard]] int fd() const { return fd_.get(); }

private:
    BounceBuffer(Fd fd, std::byte* data, std::size_t size_bytes)
        : fd_(std::move(fd)), data_(data), size_bytes_(size_bytes) {}
    static std::unique_ptr<BounceBuffer> map(Fd fd, std::size_t size_bytes);

    Fd fd_;
    std::byte* data_;
    std::size_t size_bytes_;
};

} // namespace gdrkit::twin::verbs
