// What `iorh` of a struct hf3fs_ior stands for. Here it is an address: hf3fs_prep_io has no time for a table.
#pragma once

#include "usrbio/client/agent_connection.hpp"
#include "usrbio/include/hf3fs_usrbio.h"
#include "usrbio/ring/application_side.hpp"
#include "usrbio/ring/named_semaphore.hpp"

#include <time.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace gdrkit::usrbio {

class RingHandle {
public:
    RingHandle();
    RingHandle(const RingHandle&) = delete;
    RingHandle& operator=(const RingHandle&) = delete;
    ~RingHandle();

    // As last seen; no system call.
    bool agent_gone() const noexcept {
        return gone.load(std::memory_order_relaxed) || (agent != nullptr && agent->gone());
    }

    // The thread that reaps, before it sleeps without a deadline: whether a post comes when the agent is gone.
    bool is_watched() noexcept;
    // Before the memory of the ring goes.
    void stop_watching() noexcept;

    std::unique_ptr<ApplicationRing> ring;
    NamedSemaphore submit_semaphore;
    std::shared_ptr<AgentConnection> agent; // Null: a FUSE mount without an agent's socket.
    std::atomic<bool> gone{false};
    // In a child after fork(): the ring's memory and its semaphore are the parent's, and not to be touched.
    std::atomic<bool> inherited{false};
    // submit() had to wake the agent: it takes long, so that waiting for it by spinning is a waste.
    std::atomic<bool> agent_was_asleep{false};

    std::timed_mutex reaping; // One thread at a time; the others have nothing to reap then either.
    unsigned spins = 64;      // How long a wait spins; what did not help is halved, what did is doubled.
    unsigned waits = 0;
    timespec next_look{}; // When a wait asks for the agent again, if nothing came until then; CLOCK_REALTIME.
    enum class Watching : std::uint8_t { not_asked, no, yes } watching = Watching::not_asked;
};

} // namespace gdrkit::usrbio
