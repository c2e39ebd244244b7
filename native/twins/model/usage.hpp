// The record of what this process does with a twin, for the report of `gdrkit run`. `gdrkit run` creates one file for a
// run and names it in GDRKIT_TWINS_RUN. The twins of all processes of the run map this file and update it at once, so a
// process that is killed loses nothing. Without the variable nothing is recorded.
#pragma once

#include <cstdint>
#include <string_view>

namespace gdrkit::twin {

// The twins of the CUDA runtime (cuda_runtime_*) count no objects, because the CUDA twin counts them.
enum class UsedApi : std::uint32_t {
    none = 0,
    verbs = 1,
    cuda = 2,
    cufile = 3,
    hlthunk = 4,
    cuda_runtime_12 = 5,
    cuda_runtime_13 = 6,
};

// Record that this process has called the twin of this API. A twin calls this once, at its first call.
void record_use(UsedApi api);

// Count a new handle of the ledger if its kind shows that the program uses the API. These kinds are: all kinds of CUDA
// except contexts, registered files of cuFile, and open devices of hl-thunk.
void record_object(std::string_view kind);

// Count a queue pair that the program has brought to the state RTR. A queue pair without a connection is not counted:
// UCX creates queue pairs to find out what a device supports, even if all its bytes then go by TCP.
void record_ready_queue_pair();

// Add a positive or negative change to the numbers of verbs queue pairs and memory regions that exist now, and to the
// total size of the regions.
void record_queue_pairs(std::int64_t change);
void record_regions(std::int64_t change, std::int64_t changed_bytes);

// Count payload bytes that the twin moved.
void record_bytes(std::uint64_t length_bytes);

} // namespace gdrkit::twin
