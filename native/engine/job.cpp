#include "engine/job.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace gdrkit::engine {
namespace {

constexpr std::uint64_t window_max_bytes = 64U << 20U;
constexpr std::uint64_t chunk_step_bytes = 64U << 10U;
constexpr std::size_t parts_max = 1024;
// Number of chunks per worker into which a short job is split.
constexpr std::uint64_t chunks_per_worker = 2;

} // namespace

Job::Job(Direction direction, Access access, int device, std::vector<std::shared_ptr<File>> files,
         std::vector<Extent> extents, const Tuning& tuning, bool durable)
    : direction_(direction), access_(access), device_(device), tuning_(tuning), files_(std::move(files)),
      extents_(std::move(extents)), durable_(durable), window_bytes_(window_max_bytes) {
    for (const Extent& each : extents_) {
        total_bytes_ += each.length;
        files_[each.file]->add_pending(each.length);
    }
    for (const std::shared_ptr<File>& each : files_) {
        each->add_pending(durable_ ? 1 : 0); // The file stays open until its data is on the disk.
    }
    const std::uint64_t share = total_bytes_ / (tuning_.workers_count * chunks_per_worker) + 1;
    const std::uint64_t first = std::min(tuning_.first_chunk_bytes, tuning_.chunk_bytes);
    chunk_min_bytes_ = std::clamp(share, std::min(chunk_step_bytes, first), first);
    chunks_count_ = total_bytes_ / chunk_min_bytes_ + 1;
    skip_empty();
    if (next_ == extents_.size()) {
        end_unlocked();
    }
}

// Returns the size of the next chunk. The first chunks are small, so that the device can start at once. A later chunk
// is as large as what the workers can read while the device copies the chunks before it. At the end the chunks are
// small again, so that all workers end at the same time.
std::uint64_t Job::next_chunk_bytes() const {
    const std::uint64_t share = std::min(taken_bytes_, total_bytes_ - taken_bytes_) / tuning_.workers_count;
    return std::clamp(share / chunk_step_bytes * chunk_step_bytes, chunk_min_bytes_, tuning_.chunk_bytes);
}

// Returns the size of the next coalesced copy, or 0 if too little is left for one. All workers together fill it faster
// than the device copies it.
std::uint64_t Job::next_coalesced_bytes() const {
    if (direction_ == Direction::write || device_ == host_memory) {
        return 0;
    }
    const std::uint64_t share = std::min(taken_bytes_, total_bytes_ - taken_bytes_) / 2;
    const std::uint64_t bytes = std::min(share / chunk_step_bytes * chunk_step_bytes, tuning_.coalesced_bytes);
    return bytes > tuning_.chunk_bytes ? bytes : 0;
}

void Job::skip_empty() {
    while (next_ < extents_.size() && extents_[next_].length == next_offset_) {
        ++next_;
        next_offset_ = 0;
        window_end_ = 0;
    }
}

TakeResult Job::take(Chunk& chunk, std::atomic<bool>& is_opening) {
    const std::lock_guard lock(mutex_);
    if (stopped_ || next_ == extents_.size()) {
        return TakeResult::nothing;
    }
    chunk.parts.clear();
    chunk.bytes = 0;
    chunk.direct = false;
    chunk.is_reserved = false;
    chunk.is_coalesced = false;
    Extent& extent = extents_[next_];
    if (next_offset_ > 0 || extent.length > next_chunk_bytes()) {
        try {
            const TakeResult taken = take_large(chunk, extent, is_opening);
            if (taken != TakeResult::chunk) {
                return taken;
            }
        } catch (const Error& error) {
            progress_.failure = error.failure();
            progress_.failed_extent = next_;
            stopped_ = true;
            if (in_flight_ == 0) {
                end_unlocked();
            }
            return TakeResult::nothing;
        }
    } else {
        take_small(chunk);
    }
    taken_bytes_ += chunk.bytes;
    ++in_flight_;
    return TakeResult::chunk;
}

// Returns whether the next bytes of the extent bypass the page cache. The decision is stored for the window that begins
// with them.
bool Job::is_next_direct(Extent& extent) {
    if (next_offset_ < window_end_) {
        return window_direct_;
    }
    if (access_ == Access::buffered || direction_ == Direction::write) {
        window_end_ = extent.length;
        window_direct_ = access_ == Access::direct && files_[extent.file]->direct() >= 0;
        return window_direct_;
    }
    File& file = *files_[extent.file];
    const std::uint64_t left = extent.length - next_offset_;
    if (file.direct() < 0) {
        window_end_ = extent.length;
        window_direct_ = false;
    } else if (access_ == Access::direct) {
        window_end_ = extent.length;
        window_direct_ = true;
    } else {
        // If cached and uncached ranges are close together, the window shrinks; otherwise it grows again.
        std::uint64_t bytes = std::min(window_max_bytes, window_bytes_ * 4);
        Residency residency = file.residency_of(extent.offset + next_offset_, std::min(left, bytes));
        while (residency.state == CacheState::some && bytes > tuning_.direct_min_bytes) {
            bytes /= 4;
            residency = file.residency_of(extent.offset + next_offset_, std::min(left, bytes));
        }
        window_bytes_ = bytes;
        window_end_ = next_offset_ + std::min(left, bytes);
        window_direct_ = residency.state == CacheState::none ||
                         (residency.state == CacheState::some && residency.cached_pages * 2 < residency.pages);
    }
    return window_direct_;
}

// Returns how many workers may read or write at the same time.
std::size_t Job::reservations_max(bool direct) const {
    if (direction_ == Direction::read) {
        return direct ? tuning_.direct_readers_count : tuning_.workers_count;
    }
    return direct ? tuning_.direct_writers_count : tuning_.buffered_writers_count;
}

TakeResult Job::take_large(Chunk& chunk, Extent& extent, std::atomic<bool>& is_opening) {
    const bool direct = is_next_direct(extent);
    const bool needs_reservation = direct || direction_ == Direction::write;
    if (needs_reservation && reservations_ >= reservations_max(direct)) {
        return TakeResult::busy;
    }
    const std::uint64_t direct_bytes =
        direction_ == Direction::read ? tuning_.direct_read_bytes : tuning_.direct_write_bytes;
    const std::uint64_t coalesced_bytes = direct ? 0 : std::min(next_coalesced_bytes(), window_end_ - next_offset_);
    const bool is_coalesced = coalesced_bytes > tuning_.chunk_bytes;
    if (is_coalesced && is_opening.exchange(true, std::memory_order_relaxed)) {
        return TakeResult::busy;
    }
    const std::uint64_t length_max = direct ? direct_bytes : is_coalesced ? coalesced_bytes : next_chunk_bytes();
    // Chunks end at block boundaries of the file, so that only the first and the last of an extent have partial blocks.
    const std::uint64_t begin = extent.offset + next_offset_;
    std::uint64_t length = std::min(length_max, window_end_ - next_offset_);
    if (const std::uint64_t partial = (begin + length) % files_[extent.file]->alignment_bytes();
        partial < length && next_offset_ + length < extent.length) {
        length -= partial;
    }
    chunk.direct = direct;
    chunk.is_reserved = needs_reservation;
    chunk.is_coalesced = is_coalesced;
    reservations_ += needs_reservation ? 1 : 0;
    chunk.bytes = length;
    chunk.parts.push_back(Part{.extent = next_, .extent_offset = next_offset_, .length = length});
    next_offset_ += length;
    skip_empty();
    return TakeResult::chunk;
}

void Job::take_small(Chunk& chunk) {
    const std::uint64_t bytes_max = next_chunk_bytes();
    const bool needs_slack = access_ == Access::direct && direction_ == Direction::read;
    std::uint64_t slack_left = slack_bytes;
    while (next_ < extents_.size() && next_offset_ == 0 && chunk.parts.size() < parts_max &&
           chunk.bytes + extents_[next_].length <= bytes_max) {
        const Extent& extent = extents_[next_];
        // A part without slack would be read through the page cache. The alignment of a file that is not open yet is
        // assumed to be that of most disks.
        const std::uint64_t slack = needs_slack ? 2 * files_[extent.file]->alignment_bytes() : 0;
        if (slack > slack_left && !chunk.parts.empty()) {
            break;
        }
        slack_left -= std::min(slack, slack_left);
        chunk.parts.push_back(Part{.extent = next_, .extent_offset = 0, .length = extent.length});
        chunk.bytes += extent.length;
        next_offset_ = extent.length;
        skip_empty();
    }
}

void Job::release_reservation(Chunk& chunk) {
    if (chunk.is_reserved) {
        chunk.is_reserved = false;
        release_reservation();
    }
}

void Job::release_reservation() {
    const std::lock_guard lock(mutex_);
    --reservations_;
}

void Job::complete(Chunk& chunk, std::uint64_t direct_bytes) {
    std::uint64_t bytes = 0;
    for (const Part& each : chunk.parts) {
        bytes += each.done_bytes;
        file(each).remove_pending(each.length);
    }
    std::unique_lock lock(mutex_);
    if (bytes < chunk.bytes) {
        for (const Part& each : chunk.parts) {
            if (each.done_bytes < each.length) {
                Extent& extent = extents_[each.extent];
                extent.stop = std::min(extent.stop, each.extent_offset + each.done_bytes);
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
        extents_[next_].stop = std::min(extents_[next_].stop, next_offset_);
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
    std::vector<std::uint64_t> bytes;
    bytes.reserve(extents_.size());
    for (const Extent& each : extents_) {
        bytes.push_back(std::min(each.stop, each.length));
    }
    return bytes;
}

} // namespace gdrkit::engine
