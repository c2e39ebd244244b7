// The connection manager of this process: one lock for its whole state, and one thread that waits for messages of peers
// and for deadlines. The kernel's connection manager has the same role below the real library.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>

namespace gdrkit::twin::rdmacm {

// The lock of all identifiers, connections and devices. A thread must not block while it holds this lock.
std::mutex& manager_mutex();

using Token = std::uint64_t; // identifies a watch or a timer; 0: none

// The caller of the functions below holds the lock. unwatch() and cancel_timer() ignore unknown tokens.

// Let the manager's thread call `on_readable`, with the lock held, whenever the descriptor is readable or at its end of
// file, until unwatch() is called.
Token watch(int fd, std::function<void()> on_readable);
void unwatch(Token token);

// Let the manager's thread call `on_expiry` once after the delay, with the lock held, unless the timer is cancelled.
Token start_timer(std::chrono::milliseconds delay, std::function<void()> on_expiry);
void cancel_timer(Token token);

} // namespace gdrkit::twin::rdmacm
