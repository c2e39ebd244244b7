// Statistics counters of levels 1 to 3.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <sys/types.h>

#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

enum class Route { p2p = 1, nvfs = 2, posix = 3 };
enum class Call { plain, vector, batch, stream };

// Record of one transfer, for the statistics.
struct TransferRecord {
    Call call = Call::plain;
    bool writing = false;
    int device = -1; // -1: host memory
    Route route = Route::posix;
    bool unaligned = false;
    ssize_t result = 0; // number of bytes, or a negative error
    std::chrono::microseconds duration{0};
};

// Count an event while statistics are started; otherwise do nothing.
void count(const TransferRecord& record);
void count_registration(int device, std::size_t length_bytes, bool registered, bool ok);
void count_operation(OpCounter StatsLevel1::*index, bool ok);
// Count one call of cuFileReadv or cuFileWritev. Its elements were counted before.
void count_vectored_call(const TransferRecord& record);
// Count one transfer of a batch by its path.
void count_submitted(Route route);

// Set the level given by the environment or cufile.json, unless a call has set it.
void set_default_level(int level);

} // namespace gdrkit::twin::cufile
