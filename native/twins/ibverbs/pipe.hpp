// A pipe that moves large write payloads with one copy instead of two. The requester splices the pages of its memory
// into the pipe (vmsplice), and the responder reads them into the memory of its region. For an unmapped address,
// vmsplice and the read call fail with EFAULT and raise no signal. Spliced pages stay valid until they are read, even
// if the process of the requester dies. When a queue pair stops in a live process, the requester removes all pages from
// the pipe.
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
    // errno if no pipe can be created.
    static std::unique_ptr<Pipe> make();
    // Open the pipe that came over the socket (responder). Return nullptr if the descriptor is not a pipe.
    static std::unique_ptr<Pipe> adopt(Fd fd);
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;

    // The read end, which the requester passes to the responder.
    [[nodiscard]] int reader() const { return reader_.get(); }
    // The capacity in pages of 4096 bytes; 0 if the pipe cannot be used. A partly used page counts as a page.
    [[nodiscard]] std::uint32_t max_pages() const { return max_pages_; }
    // Return the number of pages that contain bytes of [address, address + size).
    static std::uint32_t count_pages(std::uint64_t address, std::uint64_t size_bytes);

    // Splice the pages of `memory` into the pipe. Return 0 or an errno: EFAULT, or EAGAIN if they exceed the capacity.
    int splice_in(const void* memory, std::size_t size_bytes);
    // Read `size_bytes` bytes into `memory`. Return 0 or an errno: EFAULT, or EPIPE if the pipe holds fewer bytes.
    int read(void* memory, std::size_t size_bytes);
    // Splice or read several memory ranges. *succeeded_count is set to the number of ranges before the first failure.
    // Return 0, or the errno of the range that failed.
    int splice_in(std::span<const iovec> ranges, std::size_t* succeeded_count);
    int read(std::span<const iovec> ranges, std::size_t* succeeded_count);
    // Remove all spliced pages, so that no process reads them after this call.
    void drain();

private:
    Pipe(Fd reader, Fd writer, std::uint32_t max_pages)
        : reader_(std::move(reader)), writer_(std::move(writer)), max_pages_(max_pages) {}
    bool can_splice();

    Fd reader_, writer_;
    std::uint32_t max_pages_;
};

} // namespace gdrkit::twin::verbs
