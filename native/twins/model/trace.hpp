// A log of the calls that a client made, with arguments and results, in order. Tests compare the log with the calls
// that the real library expects.
#pragma once

#include <string>

namespace gdrkit::twin {

// Append one call, formatted as by printf. Only the last 512 calls are kept.
[[gnu::format(printf, 1, 2)]] void trace(const char* format, ...);

// Return the log as a JSON array of "<monotonic time in ns> <call>", oldest first. The times allow merging the logs of
// two twins.
std::string trace_json();

} // namespace gdrkit::twin
