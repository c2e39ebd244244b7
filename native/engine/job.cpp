#include "engine/job.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace gdrkit::engine {
namespace {

constexpr std::uint64_t window_most_bytes = 64U << 20U;
constexpr std::uint64_t grain_bytes = 64U << 10U;
constexpr std::size_t parts_max = 1024;
// A short job is split so that each worker gets a few pieces.
constexpr std::uint64_t pieces_each = 2;

} // namespace

Job::Job(Direction direction, Access access, int device, std::vector<std::shared_ptr<File>> files,
         std::vector<Extent> extents, const Tuning& tuning, bool durable)
    : direction_(direction), access_(access), device_(device), tuning_(tuning), files_(std::move(files)),
      extents_(std::move(extents)), durable_(durable), window_bytes_(window_most_bytes) {
    for (const Extent& each : extents_) {
        whole_bytes_ += each.length;
        files_[each.file]->expect(each.length);
    }
    for (const std::shared_ptr<File>& each : files_) {
        each->expect(durable_ ? 1 : 0); // The file stays open until its data is on the disk.
    }
    const std::uint64_t share = whole_bytes_ / (tuning_.workers_count * pieces_each) + 1;
    const std::uint64_t first = std::min(tuning_.first_bytes, tuning_.piece_bytes);
    least_bytes_ = std::clamp(share, std::min(grain_bytes, first), first);
    pieces_count_ = whole_bytes_ / least_bytes_ + 1;
    skip_empty();
    if (next_ == extents_.size()) {
        end_unlocked();
    }
}

// Returns the size of the next piece. The first pieces are small, so that the device can start at once. Each is as long
// as the device is busy with those before it. Towards the end they shrink, so that all workers end at the same time.
std::uint64_t Job::grain() const {
    const std::uint64_t share = std::min(taken_bytes_, whole_bytes_ - taken_bytes_) / tuning_.workers_count;
    return std::clamp(share / grain_bytes * grain_bytes, least_bytes_, tuning_.piece_bytes);
}

// Returns the size of the next coalesced copy. All workers together fill it faster than the device copies it. 0 means
// that too little is left for one.
std::uint64_t Job::haul_grain() const {
    if (direction_ == Direction::write || device_ == host_memory) {
        return 0;
    }
    const std::uint64_t share = std::min(taken_bytes_, whole_bytes_ - taken_bytes_) / 2;
    const std::uint64_t found = std::min(share / grain_bytes * grain_bytes, tuning_.haul_bytes);
    return found > tuning_.piece_bytes ? found : 0;
}

void Job::skip_empty() {
    while (next_ < extents_.size() && extents_[next_].length == next_at_) {
        ++next_;
        next_at_ = 0;
        window_end_ = 0;
    }
}

Taken Job::take(Piece& piece, std::atomic<bool>& opening) {
    const std::lock_guard lock(mutex_);
    if (stopped_ || next_ == extents_.size()) {
        return Taken::nothing;
    }
    piece.parts.clear();
    piece.bytes = 0;
    piece.direct = false;
    piece.limited = false;
    piece.hauled = false;
    Extent& extent = extents_[next_];
    if (next_at_ > 0 || extent.length > grain()) {
        try {
            const Taken taken = take_large(piece, extent, opening);
            if (taken != Taken::piece) {
                return taken;
            }
        } catch (const Error& error) {
            progress_.failure = error.failure();
            progress_.failed_extent = next_;
            stopped_ = true;
            if (in_flight_ == 0) {
                end_unlocked();
            }
            return Taken::nothing;
        }
    } else {
        take_small(piece);
    }
    taken_bytes_ += piece.bytes;
    ++in_flight_;
    return Taken::piece;
}

// Decides how the next bytes of the extent are read, for the longest range with the same decision.
bool Job::look_ahead(Extent& extent) {
    if (next_at_ < window_end_) {
        return window_direct_;
    }
    if (access_ == Access::buffered || direction_ == Direction::write) {
        window_end_ = extent.length;
        window_direct_ = access_ == Access::direct && files_[extent.file]->direct() >= 0;
        return window_direct_;
    }
    File& file = *files_[extent.file];
    const std::uint64_t left = extent.length - next_at_;
    if (file.direct() < 0) {
        window_end_ = extent.length;
        window_direct_ = false;
    } else if (access_ == Access::direct) {
        window_end_ = extent.length;
        window_direct_ = true;
    } else {
        // If cached and uncached ranges are close together, the window shrinks; otherwise it grows again.
        std::uint64_t bytes = std::min(window_most_bytes, window_bytes_ * 4);
        Residency found = file.residency_of(extent.offset + next_at_, std::min(left, bytes));
        while (found.state == Cached::some && bytes > tuning_.direct_least_bytes) {
            bytes /= 4;
            found = file.residency_of(extent.offset + next_at_, std::min(left, bytes));
        }
        window_bytes_ = bytes;
        window_end_ = next_at_ + std::min(left, bytes);
        window_direct_ =
            found.state == Cached::none || (found.state == Cached::some && found.cached_pages * 2 < found.pages);
    }
    return window_direct_;
}

// Returns how many workers may read or write at the same time.
std::size_t Job::limit_of(bool direct) const {
    if (direction_ == Direction::read) {
        return direct ? tuning_.direct_readers_count : tuning_.workers_count;
    }
    return direct ? tuning_.direct_writers_count : tuning_.buffered_writers_count;
}

Taken Job::take_large(Piece& piece, Extent& extent, std::atomic<bool>& opening) {
    const bool direct = look_ahead(extent);
    const bool limited = direct || direction_ == Direction::write;
    if (limited && limited_ >= limit_of(direct)) {
        return Taken::busy;
    }
    const std::uint64_t direct_bytes =
        direction_ == Direction::read ? tuning_.direct_read_bytes : tuning_.direct_write_bytes;
    const std::uint64_t together = direct ? 0 : std::min(haul_grain(), window_end_ - next_at_);
    const bool hauled = together > tuning_.piece_bytes;
    if (hauled && opening.exchange(true, std::memory_order_relaxed)) {
        return Taken::busy;
    }
    const std::uint64_t most = direct ? direct_bytes : hauled ? together : grain();
    // Pieces end at block boundaries of the file, so that only the first and the last of an extent have partial blocks.
    const std::uint64_t begin = extent.offset + next_at_;
    std::uint64_t length = std::min(most, window_end_ - next_at_);
    if (const std::uint64_t odd = (begin + length) % files_[extent.file]->alignment_bytes();
        odd < length && next_at_ + length < extent.length) {
        length -= odd;
    }
    piece.direct = direct;
    piece.limited = limited;
    piece.hauled = hauled;
    limited_ += limited ? 1 : 0;
    piece.bytes = length;
    piece.parts.push_back(Part{.extent = next_, .at = next_at_, .length = length});
    next_at_ += length;
    skip_empty();
    return Taken::piece;
}

void Job::take_small(Piece& piece) {
    const std::uint64_t most = grain();
    while (next_ < extents_.size() && next_at_ == 0 && piece.parts.size() < parts_max &&
           piece.bytes + extents_[next_].length <= most) {
        const Extent& extent = extents_[next_];
        piece.parts.push_back(Part{.extent = next_, .at = 0, .length = extent.length});
        piece.bytes += extent.length;
        next_at_ = extent.length;
        skip_empty();
    }
}

void Job::release(Piece& piece) {
    if (piece.limited) {
        piece.limited = false;
        release_place();
    }
}

void Job::release_place() {
    const std::lock_guard lock(mutex_);
    --limited_;
}

void Job::settle(Piece& piece, std::uint64_t direct_bytes) {
    std::uint64_t bytes = 0;
    for (const Part& each : piece.parts) {
        bytes += each.done;
        file(each).settle(each.length);
    }
    std::unique_lock lock(mutex_);
    if (bytes < piece.bytes) {
        for (const Part& each : piece.parts) {
            if (each.done < each.length) {
                Extent& extent = extents_[each.extent];
                extent.stop = std::min(extent.stop, each.at + each.done);
            }
        }
    }
    progress_.bytes += bytes;
    progress_.direct_bytes += direct_bytes;
    --in_flight_;
    if (!is_last_unlocked()) {
        return;
    }
    if (durable_ && !stopped_) {
        // No other worker has work left in this job.
        lock.unlock();
        const std::optional<Failure> failure = make_durable();
        lock.lock();
        if (failure && !progress_.failure) {
            progress_.failure = failure;
        }
    }
    end_unlocked();
}

std::optional<Failure> Job::make_durable() {
    for (const std::shared_ptr<File>& each : files_) {
        try {
            if (fdatasync(each->buffered()) != 0) {
                return Failure{.api = Api::kernel, .operation = "fdatasync", .number = errno, .name = {}};
            }
        } catch (const Error& error) {
            return error.failure();
        }
    }
    return std::nullopt;
}

void Job::fail(std::uint32_t extent, Failure failure) {
    const std::lock_guard lock(mutex_);
    if (!progress_.failure) {
        progress_.failure = std::move(failure);
        progress_.failed_extent = extent;
    }
    stopped_ = true;
}

void Job::cancel() {
    const std::lock_guard lock(mutex_);
    if (!over_ && next_ < extents_.size() && !stopped_) {
        stopped_ = true;
        progress_.cancelled = true;
        if (in_flight_ == 0) {
            end_unlocked();
        }
    }
}

void Job::end_unlocked() {
    // Ranges that were never taken did not arrive.
    if (next_ < extents_.size()) {
        extents_[next_].stop = std::min(extents_[next_].stop, next_at_);
        for (std::uint32_t later = next_ + 1; later < extents_.size(); ++later) {
            extents_[later].stop = 0;
        }
    }
    for (const std::shared_ptr<File>& each : files_) {
        each->end();
        if (each->direct_refusal() != 0) {
            progress_.direct_refusal = each->direct_refusal();
        }
    }
    over_ = true;
    over_changed_.notify_all();
}

bool Job::wait(std::int64_t timeout_us) {
    std::unique_lock lock(mutex_);
    if (timeout_us < 0) {
        over_changed_.wait(lock, [&] { return over_; });
        return true;
    }
    return over_changed_.wait_for(lock, std::chrono::microseconds(timeout_us), [&] { return over_; });
}

bool Job::is_over() {
    const std::lock_guard lock(mutex_);
    return over_;
}

Progress Job::progress() {
    const std::lock_guard lock(mutex_);
    return progress_;
}

std::vector<std::uint64_t> Job::arrived() {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint64_t> found;
    found.reserve(extents_.size());
    for (const Extent& each : extents_) {
        found.push_back(std::min(each.stop, each.length));
    }
    return found;
}

} // namespace gdrkit::engine
