// What a session's thread has under way. Included by the session's own files alone.
#pragma once

#include <algorithm>
#include <chrono>

#include "storage/session.hpp"

namespace gdrkit::storage {

// An operation that has no result yet.
struct Session::Pending {
    Operation operation{};
    std::shared_ptr<OpenFile> file;
    std::uint64_t begun = 0; // Bytes that have a segment.
    std::uint64_t moved = 0; // Bytes of the result, unless error.
    std::int64_t error = 0;
    std::uint32_t segments = 0; // Under way.
    std::uint32_t checksum = 0;
    bool is_last = false; // No further segment begins: the end of the file, or an error.
    bool is_finished = false;
    std::vector<HoleExtent> holes;

    // For another operation; what has room keeps it.
    void begin_anew(const Operation& next) noexcept {
        operation = next;
        file.reset();
        begun = moved = 0;
        error = 0;
        segments = checksum = 0;
        is_last = is_finished = false;
        holes.clear();
    }
    bool is_begun() const noexcept { return is_last || begun == operation.length; }
};

// A part of an operation that fits into a slot of the staging memory.
struct Session::Segment {
    Pending* pending = nullptr; // Null: the segment is free.
    verbs::Staging::Slot slot;
    std::uint32_t number = 0;
    std::uint64_t begin = 0;     // In the operation.
    std::size_t length = 0;      // Bytes to move.
    std::size_t skip = 0;        // Where they begin in the slot.
    std::uint32_t transfers = 0; // Under way.
    bool has_failed = false;
};

// Looking again and again, for so long after the last piece of work, or for a few times as long.
class Spin {
public:
    explicit Spin(std::uint32_t microseconds) : limit_(microseconds), since_(Clock::now()) {}
    void begin() { since_ = Clock::now(); }
    bool goes_on(bool progress, unsigned times) {
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
