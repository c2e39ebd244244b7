// The connection of this process to the agent of a mount. There is one per mount. It is created when it is first
// needed, and again after a fork and after the agent died. What the process publishes over it lives as long as it does.
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

    // Sends one request and receives its reply of exactly reply.size() bytes. Returns 0; the agent's -errno; -EREMOTEIO
    // if the agent has ended, did not reply within half a minute, or sent an invalid reply; or -E2BIG if the request is
    // too long. After -EREMOTEIO no further request is possible over this connection, but publications over it may
    // still be served until peer_closed().
    int call(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
             std::span<std::byte> reply) noexcept;

    // No further request is possible.
    bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
    // Checks by a system call whether the agent has closed its end: it has then withdrawn what was published over the
    // connection, or is dead.
    bool poll_peer_closed() noexcept { return wait_peer_closed(0); }
    // Returns what the last check found. Makes no system call.
    bool peer_closed() const noexcept { return peer_closed_.load(std::memory_order_acquire); }

    // Posts `semaphore` once the agent has ended, or at once if it has, so that a wait on it needs no timer. The first
    // call starts a thread, which watches the socket until the connection ends. Returns false if the thread cannot be
    // started; the caller must then poll. The memory of the semaphore must stay until unwatch().
    bool watch(Semaphore& semaphore) noexcept;
    void unwatch(Semaphore& semaphore) noexcept;

    // Call it in a child after fork(): a copy of the socket would keep the parent's publications alive after the
    // parent's death.
    void close_descriptors() noexcept;

private:
    int exchange(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
                 std::span<std::byte> reply) noexcept;
    int send(const AgentHeader& header, std::span<const iovec> payload, std::span<const int> descriptors) noexcept;
    int receive(const AgentHeader& request, std::span<std::byte> reply) noexcept;
    int fail(const char* reason, int close_timeout_ms) noexcept;
    bool wait_peer_closed(int timeout_ms) noexcept;
    void wait_agent_exit() noexcept;
    struct WatchThread;
    bool start_watch_thread() noexcept;
    void watch_socket() noexcept;

    std::mutex mutex_;
    std::atomic<int> fd_;
    std::atomic<int> agent_pidfd_{-1};
    pid_t agent_pid_ = 0;
    std::atomic<bool> failed_{false};
    std::atomic<bool> peer_closed_{false};
    std::uint64_t sequence_ = 0;

    // Guarded by library_mutex(), except in the destructor.
    std::vector<Semaphore*> watched_;
    bool is_watched_ = false;
    // Shared with the thread, which releases it when it uses this object no more.
    std::shared_ptr<std::binary_semaphore> watch_done_;
};

// Returns the connection for a mount, open as of now. Returns 0; -ENOENT: the mount has no agent's socket (it may still
// be a FUSE mount of 3FS); -EREMOTEIO: no process listens on the socket; -EACCES: it belongs to another user; or
// another -errno.
int agent_connection(const char* mount, std::shared_ptr<AgentConnection>& connection) noexcept;

} // namespace gdrkit::usrbio
