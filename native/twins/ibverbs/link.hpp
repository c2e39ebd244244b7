// The link between the requester of one queue pair and the responder of its peer. It consists of shared memory and a
// pipe. The shared memory has a ring of requests, a ring of responses and a ring for payload. The pipe is for large
// payloads of writes. The requester creates the link and passes its descriptors when it connects.
//
// Neither side trusts the other. Each request or response is copied out of the shared memory once and then checked.
// Counts are checked against the size of the ring, and the size of the memory is sealed. A side with nothing to do sets
// a flag in the shared memory and sleeps on the socket. The peer sends a wake-up only if this flag is set.
#pragma once

#include <sched.h>

#include <array>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "ibverbs/bounce_buffer.hpp"
#include "ibverbs/pipe.hpp"
#include "ibverbs/wire.hpp"

namespace gdrkit::twin::verbs {

struct GrantTable;

// Poll a condition for at most 100 us, and return whether it is true. If the result is false, the caller goes to sleep.
// In a virtual machine, a sleep and a wake-up take tens of microseconds, so polling costs less if the peer is about to
// act. sched_yield lets other threads run meanwhile. If another thread then keeps the processor for more than 50 us,
// this thread does not poll in the next 20 ms, but sleeps at once. The scheduler prefers a thread that wakes up to a
// thread that yields.
template <typename Condition> bool spin_until(Condition is_true) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::microseconds spin_time{100}, longest_yield{50}, no_spin_time{20'000};
    static thread_local Clock::time_point no_spin_before{};
    auto now = Clock::now();
    if (now < no_spin_before) {
        return is_true();
    }
    const auto deadline = now + spin_time;
    while (!is_true()) {
        sched_yield();
        const auto yielded_at = std::exchange(now, Clock::now());
        if (now - yielded_at > longest_yield) {
            no_spin_before = now + no_spin_time;
            return is_true();
        }
        if (now >= deadline) {
            return is_true();
        }
    }
    return true;
}

class Link {
public:
    // Number of slots of the request ring, and of the response ring.
    static constexpr std::uint32_t slot_count = 128;
    // Number of descriptors that the requester passes: the shared memory, and the read end of the pipe.
    static constexpr std::size_t fd_count = 2;

    // Create the shared memory and the pipe (requester). Return nullptr and set errno on failure.
    static std::unique_ptr<Link> make();
    // Map the memory and open the pipe whose descriptors came over the socket (responder). Return nullptr if the
    // descriptors are not of these types or the memory has another size.
    static std::unique_ptr<Link> adopt(std::vector<Fd> fds);

    virtual ~Link() = default;
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    [[nodiscard]] BounceBuffer& memory() const { return *memory_; }
    // The grants of the responder (grants.hpp). A link over TCP has no grants.
    [[nodiscard]] GrantTable& grants() const;
    // The pipe. A link over TCP has none, and max_pipe_pages() is 0.
    [[nodiscard]] Pipe& pipe() const { return *pipe_; }
    [[nodiscard]] std::uint32_t max_pipe_pages() const { return pipe_ == nullptr ? 0 : pipe_->max_pages(); }

    // Functions of the requester. Requests and responses are numbered from 0, modulo 2^32.

    // Return the descriptors to pass to adopt(). This object still owns them.
    [[nodiscard]] std::array<int, fd_count> fds() const { return {memory_->fd(), pipe_->reader()}; }

    // Reserve space in the payload ring and return its offset; nullopt if there is not enough space at present.
    std::optional<std::uint32_t> reserve(std::size_t size_bytes);
    // Return the number of bytes that were ever reserved. The number after a reservation is the mark with which
    // release_up_to() releases that reservation.
    [[nodiscard]] std::uint64_t reserved_bytes() const { return reserved_bytes_; }
    // Release all space up to `mark`, a value of reserved_bytes(). Space must be released in the order of the
    // reservations.
    void release_up_to(std::uint64_t mark);

    // Store a request in the ring; publish_requests makes it visible.
    void put_request(std::uint32_t request_number, const wire::Request& request);
    // Make the first `published_count` requests visible and wake the responder if it sleeps. Return false if the peer
    // is gone.
    virtual bool publish_requests(std::uint32_t published_count, int socket);
    // Return the number of responses that the responder has published.
    [[nodiscard]] std::uint32_t response_count() const;
    [[nodiscard]] wire::Response read_response(std::uint32_t request_number) const;
    // Tell the responder to drop all requests that it has not started. Then remove all spliced pages from the pipe.
    virtual void mark_ended();
    // Request a wake-up when `awaited_count` responses exist. Return false if they exist already.
    bool request_wake_at(std::uint32_t awaited_count);
    // Return the descriptor that becomes readable at a wake-up, and at the end of the connection.
    [[nodiscard]] virtual int wake_fd(int socket) const { return socket; }
    // Return whether publish_requests may wait for the peer.
    [[nodiscard]] virtual bool may_wait_for_peer() const { return false; }
    // Read and discard the wake-ups. Return false if the peer is gone.
    virtual bool consume_wakes(int socket);

    // Functions of the responder.

    // Return the number of requests that the requester has published.
    [[nodiscard]] std::uint32_t request_count() const;
    // Return whether the requester has called mark_ended.
    [[nodiscard]] bool has_ended() const;
    [[nodiscard]] wire::Request read_request(std::uint32_t request_number) const;
    // Return whether the request's payload lies within the payload ring.
    static bool is_payload_in_bounds(const wire::Request& request);
    void put_response(std::uint32_t request_number, const wire::Response& response);
    // Make the first `published_count` responses visible. Wake the requester if it sleeps and waits for at most
    // `published_count` responses.
    virtual void publish_responses(std::uint32_t published_count, int socket);
    // Return a buffer for one chunk, which the peer cannot access; nullptr if it cannot be created.
    BounceBuffer* get_private_buffer();
    // Wait until more than `served_count` requests exist. Return false at the end of the connection: the responder then
    // drops the requests that it has not started, like packets that never reach a device.
    virtual bool wait_for_request(std::uint32_t served_count, int socket);

protected:
    // Offset of the payload ring in the shared memory. The control block with the rings of requests and responses is in
    // the pages before it.
    static constexpr std::uint32_t payload_offset = 4 * 4096;

    // Create memory with empty rings. Return nullptr and set errno on failure.
    static std::unique_ptr<BounceBuffer> make_memory();
    // `pipe` is nullptr for a link over TCP.
    Link(std::unique_ptr<BounceBuffer> memory, std::unique_ptr<Pipe> pipe);
    // Store the number of published requests.
    void store_request_count(std::uint32_t published_count);
    // Store the number of published responses. Return whether the requester sleeps and must be woken.
    bool store_response_count(std::uint32_t published_count);

private:
    struct ControlBlock;

    // Request a wake-up when more than `served_count` requests exist. Return false if they exist already.
    bool request_wake_after(std::uint32_t served_count);

    std::unique_ptr<BounceBuffer> memory_;
    std::unique_ptr<Pipe> pipe_;
    // The responder's private buffer, created at first use.
    std::unique_ptr<BounceBuffer> private_buffer_;
    ControlBlock* control_; // begin of the shared memory
    // Bytes of the payload ring that were ever reserved, and ever released. Bytes that a reservation skips at the end
    // of the ring are counted too.
    std::uint64_t reserved_bytes_ = 0, released_bytes_ = 0;
};

} // namespace gdrkit::twin::verbs
