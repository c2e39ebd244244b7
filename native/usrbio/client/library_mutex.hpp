// The one mutex of the library's tables. It is held for look-ups alone, never while anything waits, and over fork(), so
// that a child never inherits it locked by a thread that it does not have.
#pragma once

#include <mutex>

namespace gdrkit::usrbio {

std::mutex& library_mutex() noexcept;

// Called in a child right after fork(), with library_mutex() held; it may neither allocate nor free. Register it once.
void in_forked_child(void (*call)()) noexcept;

} // namespace gdrkit::usrbio
