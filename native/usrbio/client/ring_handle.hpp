// The object behind `iorh` of struct hf3fs_ior. Here the handle is an address, because hf3fs_prep_io has no time for a
// table.
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

    // Returns what the last check found. Makes no system call.
    bool agent_closed() const noexcept {
        return closed.load(std::memory_order_relaxed) || (agent != nullptr && agent->peer_closed());
    }

    // Asks for a post when the agent ends. The thread that reaps calls it before it sleeps without a deadline. Returns
    // false if no post will come.
    bool is_watched() noexcept;
    // Call it before the memory of the ring is freed.
    void stop_watching() noexcept;

    std::unique_ptr<ApplicationRing> ring;
    NamedSemaphore submit_semaphore;
    std::shared_ptr<AgentConnection> agent; // Null: a FUSE mount without an agent's socket.
    std::atomic<bool> closed{false};
    // Set in a child after fork(): the ring's memory and its semaphore belong to the parent and must not be accessed.
    std::atomic<bool> inherited{false};
    // The last submit() had to wake the agent. That takes long, so spinning for its completions is useless.
    std::atomic<bool> agent_was_asleep{false};

    std::timed_mutex reap_mutex; // Locked by the thread that reaps. Other threads then have nothing to reap.
    // Length of the spinning of a wait. It is halved if it did not help, and doubled if it did.
    unsigned spin_limit = 64;
    unsigned wait_count = 0;
    timespec next_agent_check{}; // Time at which a wait checks the agent again, unless a completion comes before;
                                 // CLOCK_REALTIME.
    enum class Watch : std::uint8_t { unknown, no, yes } watch_state = Watch::unknown;
};

} // namespace gdrkit::usrbio
