// Divides a job of the copy engine into chunks that workers take, and records the progress, failure and end of the job.
#include "engine/job.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "common/futex.hpp"

namespace gdrkit::engine {
namespace {

// Largest and smallest size of a window: a range for which one query of the page cache decides whether it is read with
// O_DIRECT.
constexpr std::uint64_t window_max_bytes = 128U << 20U;
constexpr std::uint64_t window_min_bytes = 1U << 20U;
// A window is made smaller only if at least a quarter of it is cached. With less, the window is read with O_DIRECT.
constexpr std::uint64_t shrink_min_cached_divisor = 4;
// The sizes of chunks are multiples of this number.
constexpr std::uint64_t chunk_step_bytes = 64U << 10U;
// Largest number of short extents in one chunk.
constexpr std::size_t parts_per_chunk_max = 1024;
// Number of chunks per worker into which a short job is split.
constexpr std::uint64_t chunks_per_worker = 2;

} // namespace

Job::Job(Direction direction, Access access, int device, std::vector<std::shared_ptr<File>> files,
         std::vector<Extent> extents, const Tuning& tuning, bool is_durable)
    : direction_(direction), access_(access), device_(device), tuning_(tuning), files_(std::move(files)),
      extents_(std::move(extents)), is_durable_(is_durable) {
    for (const Extent& extent : extents_) {
        total_bytes_ += extent.length;
        files_[extent.file_index]->add_pending(extent.length);
    }
    for (const std::shared_ptr<File>& file : files_) {
        // For a durable job, one pending byte that no chunk removes keeps the file open until end_locked(), when its
        // data is on the disk.
        file->add_pending(is_durable_ ? 1 : 0);
        file->add_use();
    }
    const std::uint64_t even_share_bytes = total_bytes_ / (sharing_workers_count() * chunks_per_worker) + 1;
    const std::uint64_t first_chunk_bytes = std::min(tuning_.first_chunk_bytes, tuning_.chunk_bytes);
    chunk_min_bytes_ = std::clamp(even_share_bytes, std::min(chunk_step_bytes, first_chunk_bytes), first_chunk_bytes);
    chunks_count_ = total_bytes_ / chunk_min_bytes_ + 1;
    skip_taken_extents();
    if (next_extent_index_ == extents_.size()) {
        end_locked();
    }
}

// Returns the size of the next chunk. The first chunks are small, so that the device can start at once. A later chunk
// has the size that the workers can read while the device copies the chunks before it. At the end the chunks are small
// again, so that all workers finish at about the same time.
std::uint64_t Job::next_chunk_bytes() const {
    const std::uint64_t share_bytes = std::min(taken_bytes_, total_bytes_ - taken_bytes_) / sharing_workers_count();
    return std::clamp(share_bytes / chunk_step_bytes * chunk_step_bytes, chunk_min_bytes_, tuning_.chunk_bytes);
}

// Returns the size of the next coalesced copy, or 0 if the next chunk is not coalesced: for writes, for host memory,
// and near the beginning and the end of a job. The size is at most half of the bytes taken so far, and half of the
// bytes that are left. It may be larger than a chunk of one worker, because all workers fill the copy together.
std::uint64_t Job::next_coalesced_bytes() const {
    if (direction_ == Direction::write || device_ == host_memory) {
        return 0;
    }
    const std::uint64_t wanted_bytes = std::min(taken_bytes_, total_bytes_ - taken_bytes_) / 2;
    const std::uint64_t bytes = std::min(wanted_bytes / chunk_step_bytes * chunk_step_bytes, tuning_.coalesced_bytes);
    return bytes > tuning_.chunk_bytes ? bytes : 0;
}

void Job::skip_taken_extents() {
    while (next_extent_index_ < extents_.size() && extents_[next_extent_index_].length == next_offset_) {
        ++next_extent_index_;
        next_offset_ = 0;
        window_end_ = 0;
    }
}

TakeResult Job::take(Chunk& chunk, std::atomic<bool>& is_copy_opening) {
    const std::lock_guard lock(mutex_);
    if (is_stopped_ || next_extent_index_ == extents_.size()) {
        return TakeResult::nothing;
    }
    chunk.parts.clear();
    chunk.bytes = 0;
    chunk.is_direct = false;
    chunk.holds_reservation = false;
    chunk.opens_coalesced_copy = false;
    Extent& extent = extents_[next_extent_index_];
    if (next_offset_ > 0 || extent.length > next_chunk_bytes()) {
        try {
            const TakeResult take_result = take_from_long_extent(chunk, extent, is_copy_opening);
            if (take_result != TakeResult::chunk) {
                return take_result;
            }
        } catch (const Error& error) {
            progress_.failure = error.failure();
            progress_.failed_extent = next_extent_index_;
            is_stopped_ = true;
            if (chunks_in_progress_ == 0) {
                end_locked();
            }
            return TakeResult::nothing;
        }
    } else {
        take_short_extents(chunk);
    }
    taken_bytes_ += chunk.bytes;
    ++chunks_in_progress_;
    return TakeResult::chunk;
}

// Returns whether the next bytes of the extent bypass the page cache. If a new window begins with these bytes, decides
// for the whole window.
bool Job::is_next_direct(Extent& extent) {
    if (next_offset_ < window_end_) {
        return is_window_direct_;
    }
    if (access_ == Access::buffered || direction_ == Direction::write) {
        window_end_ = extent.length;
        is_window_direct_ = access_ == Access::direct && files_[extent.file_index]->direct_fd() >= 0;
        return is_window_direct_;
    }
    File& file = *files_[extent.file_index];
    const std::uint64_t file_offset = extent.offset + next_offset_;
    const std::uint64_t bytes_left = extent.length - next_offset_;
    if (file.direct_fd() < 0) {
        window_end_ = extent.length;
        is_window_direct_ = false;
    } else if (access_ == Access::direct) {
        window_end_ = extent.length;
        is_window_direct_ = true;
    } else {
        // If cached and uncached ranges are close together, the window shrinks. A few cached pages do not shrink it: in
        // a small window, a buffered read would start the kernel's readahead, so that the next small window would look
        // cached, and so on to the end of an uncached file.
        std::uint64_t window_bytes = window_max_bytes;
        Residency residency = file.residency_of(file_offset, std::min(bytes_left, window_bytes));
        while (residency.state == CacheState::some &&
               residency.cached_pages_count * shrink_min_cached_divisor >= residency.pages_count &&
               window_bytes > window_min_bytes) {
            window_bytes /= 4;
            residency = file.residency_of(file_offset, std::min(bytes_left, window_bytes));
        }
        window_end_ = next_offset_ + std::min(bytes_left, window_bytes);
        is_window_direct_ =
            residency.state == CacheState::none ||
            (residency.state == CacheState::some && residency.cached_pages_count * 2 < residency.pages_count);
    }
    return is_window_direct_;
}

// Returns how many workers may read or write for this job at the same time.
std::size_t Job::reservations_max(bool is_direct) const {
    if (direction_ == Direction::read) {
        return is_direct ? tuning_.direct_readers_count : tuning_.workers_count;
    }
    return is_direct ? tuning_.direct_writers_count : tuning_.buffered_writers_count;
}

// Returns how many workers share a long extent. A write has only a few workers, which take larger chunks: most file
// systems lock the file for each write, so many small writes of several threads would wait for each other.
std::size_t Job::sharing_workers_count() const {
    return reservations_max(direction_ == Direction::write && access_ == Access::direct);
}

TakeResult Job::take_from_long_extent(Chunk& chunk, Extent& extent, std::atomic<bool>& is_copy_opening) {
    const bool is_direct = is_next_direct(extent);
    const bool needs_reservation = is_direct || direction_ == Direction::write;
    if (needs_reservation && reservations_count_ >= reservations_max(is_direct)) {
        return TakeResult::busy;
    }
    const std::uint64_t direct_length_max =
        direction_ == Direction::read ? tuning_.direct_read_bytes : tuning_.direct_write_bytes;
    const std::uint64_t coalesced_bytes = is_direct ? 0 : std::min(next_coalesced_bytes(), window_end_ - next_offset_);
    const bool opens_coalesced_copy = coalesced_bytes > tuning_.chunk_bytes;
    if (opens_coalesced_copy && is_copy_opening.exchange(true, std::memory_order_relaxed)) {
        return TakeResult::busy;
    }
    const std::uint64_t length_max = is_direct              ? direct_length_max
                                     : opens_coalesced_copy ? coalesced_bytes
                                                            : next_chunk_bytes();
    // Chunks end at block boundaries of the file, so that only the first and the last chunk of an extent have partial
    // blocks.
    const std::uint64_t file_offset = extent.offset + next_offset_;
    std::uint64_t length = std::min(length_max, window_end_ - next_offset_);
    if (const std::uint64_t partial_block_bytes = (file_offset + length) % files_[extent.file_index]->alignment_bytes();
        partial_block_bytes < length && next_offset_ + length < extent.length) {
        length -= partial_block_bytes;
    }
    chunk.is_direct = is_direct;
    chunk.holds_reservation = needs_reservation;
    chunk.opens_coalesced_copy = opens_coalesced_copy;
    reservations_count_ += needs_reservation ? 1 : 0;
    chunk.bytes = length;
    chunk.parts.push_back(Part{.extent_index = next_extent_index_, .extent_offset = next_offset_, .length = length});
    next_offset_ += length;
    skip_taken_extents();
    return TakeResult::chunk;
}

void Job::take_short_extents(Chunk& chunk) {
    const std::uint64_t bytes_max = next_chunk_bytes();
    const bool needs_slack = access_ == Access::direct && direction_ == Direction::read;
    std::uint64_t slack_left_bytes = slack_bytes;
    while (next_extent_index_ < extents_.size() && next_offset_ == 0 && chunk.parts.size() < parts_per_chunk_max &&
           chunk.bytes + extents_[next_extent_index_].length <= bytes_max) {
        const Extent& extent = extents_[next_extent_index_];
        // The worker needs slack to read a part with O_DIRECT (see slack_bytes). needed_slack_bytes is an estimate,
        // because a file that is not open yet reports the alignment of most disks.
        const std::uint64_t needed_slack_bytes = needs_slack ? 2 * files_[extent.file_index]->alignment_bytes() : 0;
        if (needed_slack_bytes > slack_left_bytes && !chunk.parts.empty()) {
            break;
        }
        slack_left_bytes -= std::min(needed_slack_bytes, slack_left_bytes);
        chunk.parts.push_back(Part{.extent_index = next_extent_index_, .extent_offset = 0, .length = extent.length});
        chunk.bytes += extent.length;
        next_offset_ = extent.length;
        skip_taken_extents();
    }
}

void Job::release_reservation(Chunk& chunk) {
    if (chunk.holds_reservation) {
        chunk.holds_reservation = false;
        release_reservation();
    }
}

void Job::release_reservation() {
    const std::lock_guard lock(mutex_);
    --reservations_count_;
}

void Job::complete(Chunk& chunk, std::uint64_t direct_bytes) {
    std::uint64_t done_bytes = 0;
    for (const Part& part : chunk.parts) {
        done_bytes += part.done_bytes;
        file(part).remove_pending(part.length);
    }
    std::unique_lock lock(mutex_);
    if (done_bytes < chunk.bytes) {
        for (const Part& part : chunk.parts) {
            if (part.done_bytes < part.length) {
                Extent& extent = extents_[part.extent_index];
                extent.first_missing_offset =
                    std::min(extent.first_missing_offset, part.extent_offset + part.done_bytes);
            }
        }
    }
    progress_.bytes += done_bytes;
    progress_.direct_bytes += direct_bytes;
    --chunks_in_progress_;
    if (!is_work_finished_locked()) {
        return;
    }
    if (is_durable_ && !is_stopped_) {
        // This is the last chunk, so no other worker uses the job while it is unlocked.
        lock.unlock();
        const std::optional<Failure> failure = make_durable();
        lock.lock();
        if (failure && !progress_.failure) {
            progress_.failure = failure;
        }
    }
    end_locked();
}

std::optional<Failure> Job::make_durable() {
    for (const std::shared_ptr<File>& file : files_) {
        try {
            if (fdatasync(file->buffered_fd()) != 0) {
                return Failure{.api = Api::kernel, .operation = "fdatasync", .number = errno, .name = {}};
            }
        } catch (const Error& error) {
            return error.failure();
        }
    }
    return std::nullopt;
}

void Job::fail(std::uint32_t extent_index, Failure failure) {
    const std::lock_guard lock(mutex_);
    if (!progress_.failure) {
        progress_.failure = std::move(failure);
        progress_.failed_extent = extent_index;
    }
    is_stopped_ = true;
}

void Job::cancel() {
    const std::lock_guard lock(mutex_);
    if (!is_over() && next_extent_index_ < extents_.size() && !is_stopped_) {
        is_stopped_ = true;
        progress_.is_cancelled = true;
        if (chunks_in_progress_ == 0) {
            end_locked();
        }
    }
}

void Job::end_locked() {
    // No worker has taken the bytes from next_offset_ on, so they did not arrive.
    if (next_extent_index_ < extents_.size()) {
        extents_[next_extent_index_].first_missing_offset =
            std::min(extents_[next_extent_index_].first_missing_offset, next_offset_);
        for (std::uint32_t index = next_extent_index_ + 1; index < extents_.size(); ++index) {
            extents_[index].first_missing_offset = 0;
        }
    }
    for (const std::shared_ptr<File>& file : files_) {
        file->close_reopenable_descriptors();
        if (file->direct_errno() != 0) {
            progress_.direct_open_errno = file->direct_errno();
        }
        file->end_use();
    }
    progress_.duration = std::chrono::steady_clock::now() - begin_time_;
    std::uint64_t bytes = 0;
    for (const Extent& extent : extents_) {
        bytes += std::min(extent.first_missing_offset, extent.length);
    }
    totals.add(bytes);
    completion_.end();
}

bool Job::wait(std::int64_t timeout_us) {
    return completion_.wait(timeout_us < 0 ? no_limit : std::chrono::microseconds(timeout_us));
}

std::unique_lock<std::mutex> Job::lock_unless_over() {
    return is_over() ? std::unique_lock<std::mutex>() : std::unique_lock(mutex_);
}

Progress Job::progress() {
    const std::unique_lock lock = lock_unless_over();
    return progress_;
}

std::vector<std::uint64_t> Job::arrived_bytes() {
    const std::unique_lock lock = lock_unless_over();
    std::vector<std::uint64_t> bytes;
    bytes.reserve(extents_.size());
    for (const Extent& extent : extents_) {
        bytes.push_back(std::min(extent.first_missing_offset, extent.length));
    }
    return bytes;
}

} // namespace gdrkit::engine
