// The mutex of the library's tables. It is locked for look-ups only, never during a wait. It is also locked across
// fork(), so that a child never inherits it locked by a thread that the child does not have.
#pragma once

#include <mutex>

namespace gdrkit::usrbio {

std::mutex& library_mutex() noexcept;

// Calls `call` in a child right after fork(), with library_mutex() locked. It must neither allocate nor free. Register
// it once.
void in_forked_child(void (*call)()) noexcept;

} // namespace gdrkit::usrbio
