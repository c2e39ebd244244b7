// Functions that count transfers, registrations and batches for cuFileGetStatsL1, L2 and L3.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <sys/types.h>

#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

// The path of a transfer's bytes. The values are the codes of route= in a fault plan.
enum class Route { p2p = 1, nvfs = 2, posix = 3 };
// The type of call that starts a transfer: cuFileRead and cuFileWrite (single), cuFileReadv and cuFileWritev (vector),
// cuFileBatchIOSubmit (batch), cuFileReadAsync and cuFileWriteAsync (stream).
enum class CallType { single, vector, batch, stream };

// Record of one transfer, for the statistics.
struct TransferRecord {
    CallType call_type = CallType::single;
    bool is_write = false;
    int device = -1; // -1: host memory
    Route route = Route::posix;
    bool is_unaligned = false;
    ssize_t result = 0; // number of bytes; negative: the transfer failed
    std::chrono::microseconds duration{0};
};

// The following functions count only while statistics are started.
void count_transfer(const TransferRecord& record);
void count_registration(int device, std::size_t length_bytes, bool is_registration, bool is_success);
void count_operation(OpCounter StatsLevel1::*counter, bool is_success);
// Count one call of cuFileReadv or cuFileWritev. count_transfer counts the transfer of each vector.
void count_vectored_call(const TransferRecord& record);
// Count one transfer of a batch or of a vectored call in the counter of its route.
void count_batch_submission(Route route);

// Set the level that CUFILE_PARAM_PROFILE_STATS, the environment or cufile.json requests, unless cuFileSetStatsLevel
// has set a level.
void set_default_level(int level);

} // namespace gdrkit::twin::cufile
