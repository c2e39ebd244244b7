// The memory that a requester shares with the responder that serves it: a ring of requests, the responses to them, and
// room for their payload; beside it a pipe for large payloads of writes. The requester makes it and passes it on when
// it connects. Each side believes nothing that the other can write: a request or a response is copied out once and then
// checked, counts are compared with what can be, and the size is sealed. Who has nothing to do sleeps on the socket,
// and says so here: only then is it woken.
#pragma once

#include <sched.h>

#include <array>
#include <chrono>
#include <optional>
#include <vector>

#include "ibverbs/bounce.hpp"
#include "ibverbs/pipe.hpp"
#include "ibverbs/wire.hpp"

namespace gdrkit::twin::verbs {

// Looks for a short time, before anybody sleeps: for what another thread or process is about to do this is less work
// for both than sleeping and waking, which costs tens of microseconds where the other one is on another processor of a
// virtual machine. Others that could run on this processor come first. False when it was not seen.
template <typename Seen> bool spin_until(Seen seen) {
    constexpr std::chrono::microseconds spin_time{100};
    const auto end = std::chrono::steady_clock::now() + spin_time;
    while (!seen()) {
        sched_yield();
        if (std::chrono::steady_clock::now() >= end) {
            return seen();
        }
    }
    return true;
}

class Link {
public:
    static constexpr std::uint32_t slot_count = 128;
    static constexpr std::size_t fd_count = 2;

    // By the requester; nullptr and errno.
    static std::unique_ptr<Link> make();
    // By the responder, of what came over the socket; nullptr when it is not such memory.
    static std::unique_ptr<Link> adopt(std::vector<Fd> fds);

    [[nodiscard]] Bounce& memory() const { return *memory_; }
    [[nodiscard]] Pipe& pipe() const { return *pipe_; }

    // The requester. Requests and answers are counted from 0, modulo 2^32.

    // What the responder adopts; lent.
    [[nodiscard]] std::array<int, fd_count> fds() const { return {memory_->fd(), pipe_->reader()}; }

    // Room for a payload, nullopt when there is none now; it is freed in order, up to the mark that `reserved` gave
    // after it was taken.
    std::optional<std::uint32_t> reserve(std::size_t size);
    [[nodiscard]] std::uint64_t reserved() const { return reserved_; }
    void release(std::uint64_t mark);

    void put(std::uint32_t number, const wire::Request& request);
    // Requests up to this one can be seen; the responder is woken if it sleeps. False when it is gone.
    bool publish_requests(std::uint32_t count, int socket);
    [[nodiscard]] std::uint32_t answered() const;
    [[nodiscard]] wire::Response response(std::uint32_t number) const;
    // Nothing more of this is wanted: what the responder has not begun it drops.
    void end();
    // Asks to be woken once there are so many answers. False when they are there already.
    bool ask_wake_at(std::uint32_t count);

    // The responder.

    [[nodiscard]] std::uint32_t submitted() const;
    [[nodiscard]] bool ended() const;
    [[nodiscard]] wire::Request request(std::uint32_t number) const;
    // Whether the request's payload lies where payload may lie.
    static bool holds(const wire::Request& request);
    void answer(std::uint32_t number, const wire::Response& response);
    // Answers up to this one can be seen; the requester is woken if it sleeps and wants so many.
    void publish_answers(std::uint32_t count, int socket);
    // Room for a chunk that nobody else sees; nullptr when there is none.
    Bounce* own_memory();
    // Asks to be woken by the next request after so many. False when it is there already.
    bool ask_wake_after(std::uint32_t count);

private:
    struct Shared;

    Link(std::unique_ptr<Bounce> memory, std::unique_ptr<Pipe> pipe);

    std::unique_ptr<Bounce> memory_;
    std::unique_ptr<Pipe> pipe_;
    // Of the responder alone, made when first wanted.
    std::unique_ptr<Bounce> own_;
    Shared* shared_;
    // Counts bytes of the payload's ring that were taken and given back, those skipped at its end too.
    std::uint64_t reserved_ = 0, released_ = 0;
};

} // namespace gdrkit::twin::verbs
