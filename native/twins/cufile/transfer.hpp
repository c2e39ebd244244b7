// One transfer between a file and memory, used by single, vectored, batch and stream calls.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cufile/cufile_abi.hpp"
#include "cufile/statistics.hpp"

namespace gdrkit::twin::cufile {

// The ranges of a transfer. It moves length_bytes bytes between the file, from file_offset on, and the buffer, from
// buffer_offset on. The offsets are in bytes.
struct TransferRange {
    FileHandle file = nullptr;
    std::size_t length_bytes = 0;
    off_t file_offset = 0;
    off_t buffer_offset = 0;
};

struct Transfer {
    CallType call_type = CallType::single;
    bool is_write = false;
    FileHandle file = nullptr;
    void* buffer = nullptr;
    std::size_t length_bytes = 0;
    off_t file_offset = 0;
    off_t buffer_offset = 0;
    // The range of a transfer of another stream that used the same buffer and was unfinished when this transfer was
    // queued, if there was one.
    std::optional<TransferRange> concurrent_range = std::nullopt;
    // The value of count_properties_calls() when this transfer was queued on a stream. If the value has changed when
    // the transfer runs, a transfer by the posix route fails (see transfer.cpp).
    std::uint64_t properties_call_count = 0;
};

// Carry out a transfer and count it. Return the number of bytes, or -1 with errno set if the file operation failed.
// Throw CufileError for all other errors.
ssize_t run_transfer(const Transfer& transfer);

// Carry out a transfer and count it, but do not throw CufileError. Return the number of bytes, -errno, or a negative
// CUfileOpError. Batches, streams and vectored calls use this function.
ssize_t run_transfer_without_throwing(const Transfer& transfer);

} // namespace gdrkit::twin::cufile
