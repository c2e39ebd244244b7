// The record of what this process does with a twin, for the report of `gdrkit run`. All twins of all processes of a run
// write into one file, which GDRKIT_TWINS_RUN names and `gdrkit run` creates. They map it and update it as they go, so
// a process that is killed loses nothing. Without the variable nothing is recorded.
#pragma once

#include <cstdint>
#include <string_view>

namespace gdrkit::twin {

enum class UsedApi : std::uint32_t { none = 0, verbs = 1, cuda = 2, cufile = 3, hlthunk = 4 };

// Record that this process has called the twin of this API. A twin calls this once, at its first call.
void record_use(UsedApi api);

// Count a new handle of the ledger, if its kind shows that the program uses the API: a queue pair, a memory allocation
// of CUDA, a file of cuFile, or an open device of hl-thunk.
void record_object(std::string_view kind);

// Count payload bytes that the twin moved.
void record_bytes(std::uint64_t length_bytes);

} // namespace gdrkit::twin
