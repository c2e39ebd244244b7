// The counters of levels 1 to 3.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <sys/types.h>

#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

enum class Route { p2p = 1, nvfs = 2, posix = 3 };
enum class Call { plain, vector, batch, stream };

// What one transfer did.
struct Done {
    Call call = Call::plain;
    bool writing = false;
    int device = -1; // -1: the host's memory
    Route route = Route::posix;
    bool unaligned = false;
    ssize_t result = 0; // bytes, or negative
    std::chrono::microseconds took{0};
};

// Counts while statistics are started, and else does nothing.
void count(const Done& done);
void count_registration(int device, std::size_t length_bytes, bool registered, bool ok);
void count_operation(OpCounter StatsLevel1::*which, bool ok);
// One call of cuFileReadv or cuFileWritev, whose pieces were counted already.
void count_vectors(const Done& done);
// One transfer of a batch that is to take `route`.
void count_submitted(Route route);

// The level that cufile.json or the environment asks for, where no call did.
void use_level(int level);

} // namespace gdrkit::twin::cufile
