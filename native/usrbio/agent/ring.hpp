// A ring of a client as the agent's loop sees it: the mapped memory, the agent's side of the ring, and its status.
#pragma once

#include <cstddef>
#include <memory>

#include "usrbio/agent/bus_guard.hpp"
#include "usrbio/agent/types.hpp"
#include "usrbio/ring/agent_side.hpp"

namespace gdrkit::usrbio::agent {

struct Client;

// A mapping of shared memory that a client created and can truncate.
class SharedMapping {
public:
    // Maps the whole file. Throws std::system_error; its code is EINVAL if a ring of this size is impossible.
    explicit SharedMapping(int fd);
    ~SharedMapping();
    SharedMapping(const SharedMapping&) = delete;
    SharedMapping& operator=(const SharedMapping&) = delete;

    void* base() const noexcept { return base_; }
    std::size_t length() const noexcept { return length_; }
    bool was_truncated() const noexcept { return guard_->has_bus_error(); }

private:
    void* base_ = nullptr;
    std::size_t length_ = 0;
    std::unique_ptr<BusGuard> guard_;
};

struct Ring {
    // Maps the shared memory `fd` and attaches the agent's side. Throws std::system_error.
    Ring(Client& owner, const RingSpec& ring_spec, int fd);

    Client& client;
    RingSpec spec;
    SharedMapping memory; // Declared before `agent_side`, so that `agent_side` is destroyed first.
    std::unique_ptr<AgentRing> agent_side;
    bool is_closing = false;      // The ring is removed when its operations in flight have ended.
    bool is_broken = false;       // The client wrote an invalid value or truncated the memory.
    bool has_unpublished = false; // The ring has completions that were not published yet.
    bool is_asleep = false;       // The loop has announced its sleep in this ring.
    // Length of the last claimed operation, in bytes. Its first value is local_bytes_per_pass of loop_io.cpp, so that
    // the first claim takes one entry. If the reads are long, the next entries then stay in the ring until a later
    // pass, in which the loop executes them itself. If the first claim took more entries, the loop would have to send
    // them to the server.
    std::uint64_t last_claimed_length = std::uint64_t{1} << 20;
};

} // namespace gdrkit::usrbio::agent
