// The connection manager of this process: one lock for its whole state, and one thread that waits for messages of peers
// and for deadlines. The kernel's connection manager has the same role below the real library.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>

namespace gdrkit::twin::rdmacm {

// The lock of all identifiers, connections and devices. No call that may block is made while it is held.
std::mutex& manager_mutex();

using Token = std::uint64_t; // 0: none

// Call `on_readable` in the thread of the manager, with the lock held, whenever the descriptor is readable, which
// includes its end of file, until unwatch is called. The caller of this function and of those below holds the lock.
Token watch(int fd, std::function<void()> on_readable);
void unwatch(Token token);

// Call `on_expiry` once in the thread of the manager, with the lock held, unless the timer is cancelled.
Token start_timer(std::chrono::milliseconds delay, std::function<void()> on_expiry);
void cancel_timer(Token token);

} // namespace gdrkit::twin::rdmacm
