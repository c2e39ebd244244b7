// This process's connection to the agent of a mount: one, made when it is first needed, made again after a fork and
// after the agent died. What was published over it lives as long as it does.
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

    // One request and its reply. 0 and exactly reply.size() bytes; or the agent's -errno; or -EREMOTEIO: it is gone, or
    // did not answer within half a minute, or answered nonsense. Then nothing can be asked over this connection any
    // more; only gone() says that what was published over it is served no more. -E2BIG: too long to send.
    int call(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
             std::span<std::byte> reply) noexcept;

    // Nothing can be asked any more.
    bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }
    // The agent has closed its end: it has taken back what was published over it, or is dead. Asks the socket, one
    // system call.
    bool look_gone() noexcept { return gone_within(0); }
    // As last seen. No system call.
    bool gone() const noexcept { return gone_.load(std::memory_order_acquire); }

    // From now on `sleeper` is posted once the agent is gone, at once if it is so already: who waits on it needs no
    // timer to notice that. A thread watches the socket, from the first call on until the connection goes. false: there
    // is no thread to be had; look for yourself. The semaphore's memory stays until forget().
    bool watch(Semaphore& sleeper) noexcept;
    void forget(Semaphore& sleeper) noexcept;

    // In a child after fork(): a copy of the socket would keep the parent's publications alive after its death.
    void abandon() noexcept;

private:
    int exchange(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
                 std::span<std::byte> reply) noexcept;
    int send(const AgentHeader& header, std::span<const iovec> payload, std::span<const int> descriptors) noexcept;
    int receive(const AgentHeader& request, std::span<std::byte> reply) noexcept;
    int end(const char* why, int patience_ms) noexcept;
    bool gone_within(int milliseconds) noexcept;
    void await_death() noexcept;
    struct Watch;
    bool start_watching() noexcept;
    void watch_socket() noexcept;

    std::mutex mutex_;
    std::atomic<int> fd_;
    std::atomic<int> process_{-1}; // A descriptor of the agent's process.
    pid_t agent_ = 0;
    std::atomic<bool> ended_{false};
    std::atomic<bool> gone_{false};
    std::uint64_t sequence_ = 0;

    // Under library_mutex(), but in the destructor.
    std::vector<Semaphore*> sleepers_;
    bool is_watched_ = false;
    std::shared_ptr<std::binary_semaphore> watch_ended_; // Also the thread's: it has done with all that is here.
};

// The connection for a mount. 0 and a connection that was alive just now; -ENOENT: the mount has no agent's socket (it
// may still be a FUSE mount of 3FS); -EREMOTEIO: a socket, and nobody behind it; -EACCES: somebody else's; or -errno.
int agent_connection(const char* mount, std::shared_ptr<AgentConnection>& connection) noexcept;

} // namespace gdrkit::usrbio
