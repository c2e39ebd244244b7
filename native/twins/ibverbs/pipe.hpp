// A pipe that moves large write payloads with one copy instead of two: the requester splices the pages of its memory
// into the pipe (vmsplice), and the responder reads them into the memory of its region. Both calls check addresses as
// every system call does: they fail with EFAULT and raise no signal. Spliced pages stay valid until they are read, even
// if the requester dies. A requester that lives drains the pipe before it reports that it has stopped.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "model/sockets.hpp"

namespace gdrkit::twin::verbs {

class Pipe {
public:
    // Create a pipe (requester). If the system does not support vmsplice, max_pages() is 0. Return nullptr and set
    // errno if there is no pipe.
    static std::unique_ptr<Pipe> make();
    // Open the pipe that came over the socket (responder). Return nullptr if the descriptor is not a pipe.
    static std::unique_ptr<Pipe> adopt(Fd fd);
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;

    // The read end, which the requester passes to the responder.
    [[nodiscard]] int reader() const { return reader_.get(); }
    // The capacity in pages; a part of a page counts as one.
    [[nodiscard]] std::uint32_t max_pages() const { return max_pages_; }
    static std::uint32_t pages_of(std::uint64_t address, std::uint64_t size);

    // Splice the pages of `memory` into the pipe. Return 0 or an errno: EFAULT, or EAGAIN if they exceed the capacity.
    int splice_in(const void* memory, std::size_t size);
    // Read `size` bytes into `memory`. Return 0 or an errno: EFAULT, or EPIPE if the pipe holds fewer bytes.
    int read(void* memory, std::size_t size);
    // The same for several parts with one call. *whole is the number of parts that succeeded; the errno belongs to the
    // part after these.
    int splice_in(std::span<const iovec> parts, std::size_t* succeeded);
    int read(std::span<const iovec> parts, std::size_t* succeeded);
    // Remove everything that was spliced, so that no process reads it after this call.
    void drain();

private:
    Pipe(Fd reader, Fd writer, std::uint32_t max_pages)
        : reader_(std::move(reader)), writer_(std::move(writer)), max_pages_(max_pages) {}
    bool can_splice();

    Fd reader_, writer_;
    std::uint32_t max_pages_;
};

} // namespace gdrkit::twin::verbs
