// RingHandle, the object to which `iorh` of struct hf3fs_ior points. `iorh` is an address, because hf3fs_prep_io uses
// it for each operation and a look-up would take too long. The handle of an iov, in contrast, is a number in a table.
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

    // Returns true if the last check found that the agent has ended, and always in a forked child. Makes no system
    // call.
    bool has_agent_ended() const noexcept {
        return is_unserved.load(std::memory_order_relaxed) || (agent != nullptr && agent->is_closed_by_agent());
    }

    // Makes the connection to the agent post the completion semaphore when the agent ends. A waiting thread calls this
    // function before it sleeps without a timer. Returns false if the connection cannot do that; the thread must then
    // poll.
    bool start_watching_agent() noexcept;
    // Makes the connection forget the completion semaphore. Call it before the memory of the ring, which contains the
    // semaphore, is freed.
    void stop_watching_agent() noexcept;

    std::unique_ptr<ApplicationRing> ring;
    NamedSemaphore submit_semaphore;
    std::shared_ptr<AgentConnection> agent; // Null: a FUSE mount without an agent's socket.
    std::atomic<bool> is_unserved{false};   // The agent no longer serves this ring, or this process is a forked child.
    // Set in a child after fork(). The memory of the ring and its semaphore belong to the parent, so a child must not
    // access them.
    std::atomic<bool> is_inherited{false};
    // True if the last submit() had to wake the agent. A wake-up takes so long that the next wait does not spin.
    std::atomic<bool> agent_was_asleep{false};

    std::timed_mutex reap_mutex; // Locked by the thread that reaps.
    // Longest time for which a call of hf3fs_wait_for_ios checks for completions before it sleeps. The call doubles
    // this time if spinning made the sleep unnecessary, and halves it otherwise.
    long spin_limit_ns = 50000;
    unsigned unspun_wait_count = 0; // Waits while spin_limit_ns was too small to spin; every 64th of these waits spins.
    timespec next_agent_check{};    // CLOCK_REALTIME at which a sleeping wait checks again whether the agent has ended.
    // Whether the connection posts the completion semaphore; unknown: start_watching_agent() was not called yet.
    enum class Watch : std::uint8_t { unknown, no, yes } watch_state = Watch::unknown;
};

} // namespace gdrkit::usrbio
