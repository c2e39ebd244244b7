// The connection manager of this process: one lock for its whole state, and one thread that waits for messages of peers
// and for deadlines. The kernel's connection manager has the same role below the real library.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>

namespace gdrkit::twin::rdmacm {

// The lock of all identifiers, connections and devices. A thread that holds it makes no call that may block.
std::mutex& manager_mutex();

using Token = std::uint64_t; // 0: none

// Until unwatch is called, call `on_readable` whenever the descriptor is readable or at its end of file. The thread of
// the manager makes this call, with the lock held. The caller of watch and of the functions below holds the lock.
Token watch(int fd, std::function<void()> on_readable);
void unwatch(Token token);

// Call `on_expiry` once in the thread of the manager, with the lock held, unless the timer is cancelled.
Token start_timer(std::chrono::milliseconds delay, std::function<void()> on_expiry);
void cancel_timer(Token token);

} // namespace gdrkit::twin::rdmacm
