// The way of large payloads from a requester to a responder with one copy instead of two: the requester lends the pages
// of its memory to a pipe, the responder reads them into the memory of its region. Both calls look at addresses as a
// system call does: EFAULT, never a signal. What was lent stays as it is until it was read, also when the requester
// dies meanwhile; a requester that lives on takes it back before it says that it stopped.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "model/rendezvous.hpp"

namespace gdrkit::twin::verbs {

class Pipe {
public:
    // By the requester. One that takes nothing where the system does not lend pages; nullptr and errno without a pipe.
    static std::unique_ptr<Pipe> make();
    // By the responder, of what came over the socket; nullptr when it is no pipe.
    static std::unique_ptr<Pipe> adopt(Fd fd);
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;

    // The end that is passed on.
    [[nodiscard]] int reader() const { return reader_.get(); }
    // How many pages it takes at a time; each part of a page counts as one.
    [[nodiscard]] std::uint32_t pages_most() const { return pages_most_; }
    static std::uint32_t pages_of(std::uint64_t address, std::uint64_t size);

    // 0 or an errno: EFAULT, or EAGAIN when more was put in than it takes.
    int lend(const void* memory, std::size_t size);
    // 0 or an errno: EFAULT, or EPIPE when there is less in it.
    int take(void* memory, std::size_t size);
    // The same of several pieces of memory by one call. `whole` is how many of them went as they should; the errno is
    // that of the one after these.
    int lend(std::span<const iovec> parts, std::size_t* whole);
    int take(std::span<const iovec> parts, std::size_t* whole);
    // Nobody reads what was lent after this.
    void take_back();

private:
    Pipe(Fd reader, Fd writer, std::uint32_t pages_most)
        : reader_(std::move(reader)), writer_(std::move(writer)), pages_most_(pages_most) {}
    bool lends();

    Fd reader_, writer_;
    std::uint32_t pages_most_;
};

} // namespace gdrkit::twin::verbs
