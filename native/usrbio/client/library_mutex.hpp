// The mutex of the library's tables. A thread holds it only for a look-up or a change of a table, never while it waits.
// The library also locks it during fork(). Otherwise a thread that exists only in the parent could have locked it, and
// the child could never lock it.
#pragma once

#include <cstdint>
#include <mutex>

namespace gdrkit::usrbio {

std::mutex& library_mutex() noexcept;

// Registers a function. Every forked child calls it right after fork(), with library_mutex() locked. The function must
// neither allocate nor free memory.
void add_fork_handler(void (*function)()) noexcept;

// Returns how often this process and its ancestors have called fork() since the library was loaded. While a thread
// holds library_mutex(), the number does not change.
std::uint64_t fork_count() noexcept;

} // namespace gdrkit::usrbio
