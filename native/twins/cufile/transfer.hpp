// One transfer between a file and memory, whichever call asked for it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "cufile/cufile_abi.hpp"
#include "cufile/statistics.hpp"

namespace gdrkit::twin::cufile {

struct Transfer {
    Call call = Call::plain;
    bool writing = false;
    FileHandle file = nullptr;
    void* buffer = nullptr;
    std::size_t length_bytes = 0;
    off_t file_offset = 0;
    off_t buffer_offset = 0;
};

// Moves the bytes and counts them. Bytes moved; -1 and errno when the file said no; throws Refused for everything else.
ssize_t carry_out(const Transfer& transfer);

// The same for who has to keep the answer: bytes, -errno, or a negative CUfileOpError.
ssize_t answer_of(const Transfer& transfer);

} // namespace gdrkit::twin::cufile
