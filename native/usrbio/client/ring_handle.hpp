// What `iorh` of a struct hf3fs_ior stands for. Here it is an address: hf3fs_prep_io has no time for a table.
#pragma once

#include "usrbio/client/agent_connection.hpp"
#include "usrbio/include/hf3fs_usrbio.h"
#include "usrbio/ring/application_side.hpp"

#include <semaphore.h>
#include <time.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace gdrkit::usrbio {

class RingHandle {
public:
    RingHandle() = default;
    RingHandle(const RingHandle&) = delete;
    RingHandle& operator=(const RingHandle&) = delete;
    ~RingHandle() {
        stop_watching();
        if (submit_semaphore != nullptr) {
            sem_close(submit_semaphore);
        }
    }

    // As last seen; no system call.
    bool agent_gone() const noexcept {
        return gone.load(std::memory_order_relaxed) || (agent != nullptr && agent->gone());
    }
    // Looks: at the ring, and at the socket by one system call.
    bool look_for_agent() noexcept {
        if (agent_gone() || ring->agent_ended() || (agent != nullptr && agent->look_gone())) {
            gone.store(true, std::memory_order_relaxed);
        }
        return !gone.load(std::memory_order_relaxed);
    }

    // The thread that reaps, before it sleeps without a deadline: whether a post comes when the agent is gone.
    bool is_watched() noexcept {
        if (watching == Watching::not_asked) {
            watching = agent != nullptr && agent->watch(ring->completed()) ? Watching::yes : Watching::no;
        }
        return watching == Watching::yes;
    }
    // Before the memory of the ring goes.
    void stop_watching() noexcept {
        if (watching == Watching::yes) {
            agent->forget(ring->completed());
            watching = Watching::no;
        }
    }

    std::unique_ptr<ApplicationRing> ring;
    sem_t* submit_semaphore = nullptr;
    std::shared_ptr<AgentConnection> agent; // Null: a FUSE mount without an agent's socket.
    std::atomic<bool> gone{false};
    // submit() had to wake the agent: it takes long, so that waiting for it by spinning is a waste.
    std::atomic<bool> agent_was_asleep{false};

    enum class Watching : std::uint8_t { not_asked, no, yes } watching = Watching::not_asked;

    std::mutex reaping;  // One thread at a time; the others have nothing to reap then either.
    unsigned spins = 64; // How long a wait spins; what did not help is halved, what did is doubled.
    unsigned waits = 0;
    timespec next_look{}; // When a wait asks for the agent again, if nothing came until then; CLOCK_REALTIME.
};

} // namespace gdrkit::usrbio
