// The connection of this process to the agent of a mount. There is one socket per mount, over which the library
// publishes memory and rings, and registers files.
//
// find_agent_connection() creates the connection when a function first needs it, and again after a fork or after the
// agent died. When a connection ends, the publications that were made over it end too.
#pragma once

#include "usrbio/client/agent_protocol.hpp"
#include "usrbio/ring/semaphore.hpp"

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <semaphore>
#include <span>
#include <string>
#include <vector>

namespace gdrkit::usrbio {

class AgentConnection {
public:
    explicit AgentConnection(int fd) noexcept;
    ~AgentConnection();
    AgentConnection(const AgentConnection&) = delete;
    AgentConnection& operator=(const AgentConnection&) = delete;

    // Sends one request and receives its reply of exactly reply.size() bytes. Returns 0 or the agent's -errno. Returns
    // -E2BIG if the request is too long. Returns -EREMOTEIO if the agent has ended, did not reply within half a minute,
    // or sent an invalid reply; this connection then accepts no further request. The agent may still serve the
    // publications of this connection until is_closed_by_agent() returns true.
    int call(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
             std::span<std::byte> reply) noexcept;

    // Sends the first request, by which both ends report their features. Returns the result of call().
    int exchange_hello() noexcept;
    // Returns true if the agent can keep a memory region registered between two publications (agent_feature_keep).
    bool keeps_registrations() const noexcept { return (features_ & agent_feature_keep) != 0; }

    // Returns true if the connection accepts no further request.
    bool has_failed() const noexcept { return has_failed_.load(std::memory_order_acquire); }
    // Checks by a system call whether the agent has closed its end of the socket. If so, the agent has withdrawn the
    // publications of this connection, or is dead.
    bool check_closed_by_agent() noexcept { return wait_until_closed_by_agent(0); }
    // Returns the result of the last check, without a system call.
    bool is_closed_by_agent() const noexcept { return is_closed_by_agent_.load(std::memory_order_acquire); }

    // Posts `semaphore` when the agent ends, or at once if the agent has ended already. So a wait on the semaphore
    // needs no timer. The first call starts a thread that watches the socket until the connection ends. Returns false
    // if the thread cannot be started; the caller must then poll. The semaphore must stay mapped until unwatch().
    bool watch(Semaphore& semaphore) noexcept;
    void unwatch(Semaphore& semaphore) noexcept; // Ends the effect of watch().

    // Closes the socket. Call it in a child after fork(), because the child's copy of the socket would keep the
    // parent's publications alive after the parent's death.
    void close_descriptors() noexcept;

private:
    int exchange(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
                 std::span<std::byte> reply) noexcept;
    int send(const AgentHeader& header, std::span<const iovec> payload, std::span<const int> descriptors) noexcept;
    int receive(const AgentHeader& request, std::span<std::byte> reply) noexcept;
    // Logs `reason`, and marks the connection as failed. Waits until the agent has closed the socket, at most
    // `close_timeout_ms`. Returns -EREMOTEIO.
    int fail(const char* reason, int close_timeout_ms) noexcept;
    bool wait_until_closed_by_agent(int timeout_ms) noexcept;
    void wait_for_agent_exit() noexcept;
    struct WatchThreadContext;
    bool start_watch_thread() noexcept;
    void watch_socket() noexcept;

    std::mutex mutex_; // Locked from a request until its reply.
    std::atomic<int> fd_;
    std::atomic<int> agent_pidfd_{-1};
    pid_t agent_pid_ = 0;
    std::uint64_t features_ = 0; // AgentHello::features of the agent. Set before other threads can use the connection.
    std::atomic<bool> has_failed_{false};
    std::atomic<bool> is_closed_by_agent_{false};
    std::uint64_t sequence_ = 0; // Number of the last request.

    // The two members below are guarded by library_mutex(), except in the destructor.
    std::vector<Semaphore*> watched_semaphores_;
    bool has_watch_thread_ = false;
    // The watch thread releases this semaphore after its last use of this object. The thread shares the ownership of
    // the semaphore, because release() may still run when this object is destroyed.
    std::shared_ptr<std::binary_semaphore> watch_thread_ended_;
};

// Sets `connection` to the open connection of a mount, and creates it if necessary. Returns 0 or -errno. -ENOENT: the
// mount has no socket of an agent (it may still be a FUSE mount of 3FS). -EREMOTEIO: no process listens on the socket.
// -EACCES: the socket belongs to another user.
int find_agent_connection(const char* mount, std::shared_ptr<AgentConnection>& connection) noexcept;

} // namespace gdrkit::usrbio
