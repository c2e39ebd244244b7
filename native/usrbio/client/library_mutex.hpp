// The mutex of the library's tables. A thread holds it only for a look-up or a change of a table, never while it waits.
// The library also locks it during fork(). Otherwise another thread of the parent could hold it during fork(). The
// child does not have this thread, so the mutex of the child would stay locked.
#pragma once

#include <cstdint>
#include <mutex>

namespace gdrkit::usrbio {

std::mutex& library_mutex() noexcept;

// Registers a function. Every forked child calls it right after fork(), with library_mutex() locked. The function must
// neither allocate nor free memory.
void add_fork_handler(void (*function)()) noexcept;

// Returns how often this process and its ancestors have called fork() since the first use of the mutex. While a thread
// holds library_mutex(), the number does not change.
std::uint64_t fork_count() noexcept;

} // namespace gdrkit::usrbio
