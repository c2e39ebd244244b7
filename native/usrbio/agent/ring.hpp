// A ring as the agent has it: its mapping, its client and its state.
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
    // Maps the whole file. Throws std::system_error; EINVAL if no ring has that size.
    explicit SharedMapping(int fd);
    ~SharedMapping();
    SharedMapping(const SharedMapping&) = delete;
    SharedMapping& operator=(const SharedMapping&) = delete;

    void* base() const noexcept { return base_; }
    std::size_t length() const noexcept { return length_; }
    bool was_truncated() const noexcept { return guard_->is_hit(); }

private:
    void* base_ = nullptr;
    std::size_t length_ = 0;
    std::unique_ptr<BusGuard> guard_;
};

struct Ring {
    // Throws std::system_error.
    Ring(Client& owner, const RingSpec& ring_spec, int fd);

    Client& client;
    RingSpec spec;
    SharedMapping memory; // Declared first, because `side` uses it until its end.
    std::unique_ptr<AgentRing> side;
    bool is_closing = false;
    bool is_broken = false;
    bool has_unpublished = false; // It has completions that were not published yet.
    bool is_asleep = false;       // The loop has announced its sleep in this ring.
};

} // namespace gdrkit::usrbio::agent
