// What a client called, in order, with its arguments: for whoever compares that with a reference.
#pragma once

#include <string>

namespace gdrkit::twin {

// Enters one call, in the form of printf. Only the last 512 are kept.
[[gnu::format(printf, 1, 2)]] void trace(const char* format, ...);

// ["<monotonic time in ns> <call>", ...] as JSON, the oldest first. Entries of two twins can be merged by the time.
std::string trace_json();

} // namespace gdrkit::twin
