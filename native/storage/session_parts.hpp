// Private types of Session: operations and segments in progress, and the busy polling of its thread. Only session.cpp
// and segments.cpp include this file.
#pragma once

#include <algorithm>
#include <chrono>

#include "storage/session.hpp"

namespace gdrkit::storage {

// An operation that has no result yet.
struct Session::PendingOperation {
    Operation operation{};
    std::shared_ptr<OpenFile> file;
    std::uint64_t started_bytes = 0; // Bytes whose segments have started.
    std::uint64_t moved_bytes = 0;   // Bytes moved so far. At the end they are the result, unless `error` is set.
    std::int64_t error = 0;          // 0 or -errno.
    std::uint32_t segments_in_progress = 0;
    std::uint32_t checksum = 0; // CRC32C of the bytes moved so far.
    bool is_cut_short = false;  // No further segment starts, because of an error or the end of the file.
    bool is_finished = false;   // The result waits to be sent.
    std::vector<HoleExtent> holes;

    // Prepares the object for another operation. Containers keep their capacity.
    void reset(const Operation& next_operation) noexcept {
        operation = next_operation;
        file.reset();
        started_bytes = moved_bytes = 0;
        error = 0;
        segments_in_progress = checksum = 0;
        is_cut_short = is_finished = false;
        holes.clear();
    }
    // Returns whether every segment of the operation has started.
    bool is_fully_started() const noexcept { return is_cut_short || started_bytes == operation.length; }
};

// A part of an operation that fits into a buffer of the staging memory.
struct Session::Segment {
    PendingOperation* pending_operation = nullptr; // Null if the segment is free.
    verbs::Staging::Buffer buffer;
    std::uint32_t index = 0;       // Index in Session::segments_. Also the id of this segment's transfers.
    std::uint64_t begin = 0;       // Offset of the first byte of the segment in the operation.
    std::size_t length = 0;        // Bytes to move.
    std::size_t buffer_offset = 0; // Offset of these bytes in the buffer.
    std::uint32_t transfers_in_progress = 0;
    bool has_failed = false; // One of its transfers has failed.
};

// Decides when a polling thread sleeps: after `factor` times `limit_us` without progress.
class SpinTimer {
public:
    explicit SpinTimer(std::uint32_t limit_us) : limit_(limit_us), last_progress_(Clock::now()) {}
    // Restarts the time limit after a sleep.
    void restart() { last_progress_ = Clock::now(); }
    bool should_continue(bool has_progress, unsigned factor) {
        const auto now = Clock::now();
        if (has_progress) {
            last_progress_ = now;
        }
        return now - last_progress_ < factor * limit_;
    }

private:
    using Clock = std::chrono::steady_clock;
    std::chrono::microseconds limit_;
    Clock::time_point last_progress_;
};

} // namespace gdrkit::storage
