// Operations and segments in progress. Only the session's own files include this.
#pragma once

#include <algorithm>
#include <chrono>

#include "storage/session.hpp"

namespace gdrkit::storage {

// An operation that has no result yet.
struct Session::PendingOperation {
    Operation operation{};
    std::shared_ptr<OpenFile> file;
    std::uint64_t started = 0; // Bytes that have a segment.
    std::uint64_t moved = 0;   // Bytes of the result, if there is no error.
    std::int64_t error = 0;
    std::uint32_t segments = 0; // Segments in progress.
    std::uint32_t checksum = 0;
    bool is_last = false; // No further segment starts, because of an error or the end of the file.
    bool is_finished = false;
    std::vector<HoleExtent> holes;

    // Prepares the object for another operation. Containers keep their capacity.
    void reset(const Operation& next) noexcept {
        operation = next;
        file.reset();
        started = moved = 0;
        error = 0;
        segments = checksum = 0;
        is_last = is_finished = false;
        holes.clear();
    }
    bool is_started() const noexcept { return is_last || started == operation.length; }
};

// A part of an operation that fits into a buffer of the staging memory.
struct Session::Segment {
    PendingOperation* pending = nullptr; // Null if the segment is free.
    verbs::Staging::Buffer buffer;
    std::uint32_t number = 0;
    std::uint64_t begin = 0;     // Offset in the operation.
    std::size_t length = 0;      // Bytes to move.
    std::size_t skip = 0;        // Offset of the bytes in the buffer.
    std::uint32_t transfers = 0; // Transfers in progress.
    bool has_failed = false;
};

// Decides how long a thread polls busily: for a time after the last progress, or a multiple of it.
class Spin {
public:
    explicit Spin(std::uint32_t microseconds) : limit_(microseconds), since_(Clock::now()) {}
    void begin() { since_ = Clock::now(); }
    bool should_continue(bool progress, unsigned times) {
        const auto now = Clock::now();
        if (progress) {
            since_ = now;
        }
        return now - since_ < times * limit_;
    }

private:
    using Clock = std::chrono::steady_clock;
    std::chrono::microseconds limit_;
    Clock::time_point since_;
};

} // namespace gdrkit::storage
