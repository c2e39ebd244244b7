// One ring as the agent has it: the mapping, whose it is, and what became of it.
#pragma once

#include <cstddef>
#include <memory>

#include "usrbio/agent/bus_guard.hpp"
#include "usrbio/agent/types.hpp"
#include "usrbio/ring/agent_side.hpp"

namespace gdrkit::usrbio::agent {

struct Client;

// Shared memory that a client made and may cut short.
class SharedMapping {
public:
    // The whole file. Throws std::system_error; EINVAL when no ring has its size.
    explicit SharedMapping(int fd);
    ~SharedMapping();
    SharedMapping(const SharedMapping&) = delete;
    SharedMapping& operator=(const SharedMapping&) = delete;

    void* base() const noexcept { return base_; }
    std::size_t length() const noexcept { return length_; }
    bool was_cut() const noexcept { return guard_->hit(); }

private:
    void* base_ = nullptr;
    std::size_t length_ = 0;
    std::unique_ptr<BusGuard> guard_;
};

struct Ring {
    // Throws std::system_error.
    Ring(Client& owner, const RingSpec& what, int fd);

    Client& client;
    RingSpec spec;
    SharedMapping memory; // Outlives what works on it.
    std::unique_ptr<AgentRing> side;
    bool is_closing = false;
    bool is_broken = false;
    bool is_touched = false; // Has completions that were not published yet.
    bool is_asleep = false;  // The application was told that the agent sleeps.
};

} // namespace gdrkit::usrbio::agent
