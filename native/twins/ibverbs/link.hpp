// The memory that the requester of one queue pair shares with the responder that serves it: a ring of requests, their
// responses and a ring for their payload, and a pipe for large payloads of writes. The requester creates it and passes
// its descriptors when it connects.
//
// Neither side trusts the other. A request or a response is copied out once and then checked, counts are checked
// against the ring's size, and the memory's size is sealed. A side with nothing to do sleeps on the socket and sets a
// flag here; the peer sends a wake-up only if that flag is set.
#pragma once

#include <sched.h>

#include <array>
#include <chrono>
#include <optional>
#include <vector>

#include "ibverbs/bounce_buffer.hpp"
#include "ibverbs/pipe.hpp"
#include "ibverbs/wire.hpp"

namespace gdrkit::twin::verbs {

// Poll `seen` for a short time before sleeping. If the other thread or process is about to act, this costs less than
// sleeping and waking, which takes tens of microseconds between processors of a virtual machine. sched_yield lets other
// threads run first. Return whether `seen` became true.
template <typename Seen> bool spin_until(Seen seen) {
    constexpr std::chrono::microseconds spin_time{100};
    const auto deadline = std::chrono::steady_clock::now() + spin_time;
    while (!seen()) {
        sched_yield();
        if (std::chrono::steady_clock::now() >= deadline) {
            return seen();
        }
    }
    return true;
}

class Link {
public:
    static constexpr std::uint32_t slot_count = 128;
    static constexpr std::size_t fd_count = 2;

    // Create the shared memory and the pipe (requester). Return nullptr and set errno on failure.
    static std::unique_ptr<Link> make();
    // Map what came over the socket (responder). Return nullptr if the descriptors are not such memory.
    static std::unique_ptr<Link> adopt(std::vector<Fd> fds);

    [[nodiscard]] BounceBuffer& memory() const { return *memory_; }
    [[nodiscard]] Pipe& pipe() const { return *pipe_; }

    // Functions of the requester. Requests and responses are numbered from 0, modulo 2^32.

    // Descriptors to pass to adopt(); still owned by this object.
    [[nodiscard]] std::array<int, fd_count> fds() const { return {memory_->fd(), pipe_->reader()}; }

    // Reserve space for a payload and return its offset; nullopt if there is none at present. Space is released in
    // order, up to the value that reserved() had after the reservation.
    std::optional<std::uint32_t> reserve(std::size_t size);
    [[nodiscard]] std::uint64_t reserved() const { return reserved_; }
    void release(std::uint64_t mark);

    // Store a request in the ring; publish_requests makes it visible.
    void put_request(std::uint32_t number, const wire::Request& request);
    // Make the first `count` requests visible and wake the responder if it sleeps. Return false if the peer is gone.
    bool publish_requests(std::uint32_t count, int socket);
    [[nodiscard]] std::uint32_t responded() const;
    [[nodiscard]] wire::Response response(std::uint32_t number) const;
    // Tell the responder to drop all requests that it has not started, and drain the pipe.
    void mark_ended();
    // Ask to be woken when `count` responses exist. Return false if they exist already.
    bool request_wake_at(std::uint32_t count);

    // Functions of the responder.

    [[nodiscard]] std::uint32_t submitted() const;
    [[nodiscard]] bool ended() const;
    [[nodiscard]] wire::Request request(std::uint32_t number) const;
    // Return whether the request's payload lies within the payload ring.
    static bool payload_in_bounds(const wire::Request& request);
    void put_response(std::uint32_t number, const wire::Response& response);
    // Make the first `count` responses visible, and wake the requester if it sleeps and waits for as many.
    void publish_responses(std::uint32_t count, int socket);
    // Return a buffer for one chunk that is not shared with the peer; nullptr if it cannot be created.
    BounceBuffer* private_buffer();
    // Ask to be woken when more than `count` requests exist. Return false if they exist already.
    bool request_wake_after(std::uint32_t count);

private:
    struct Shared;

    Link(std::unique_ptr<BounceBuffer> memory, std::unique_ptr<Pipe> pipe);

    std::unique_ptr<BounceBuffer> memory_;
    std::unique_ptr<Pipe> pipe_;
    // The responder's private buffer, created at first use.
    std::unique_ptr<BounceBuffer> private_buffer_;
    Shared* shared_;
    // Bytes of the payload ring that were ever reserved and released, including the bytes skipped at its end.
    std::uint64_t reserved_ = 0, released_ = 0;
};

} // namespace gdrkit::twin::verbs
