// A job of the copy engine: one call that moves ranges of files to or from memory. Worker threads take the job in
// chunks, in order, and report each chunk when its bytes have arrived.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/completion_queue.hpp"
#include "engine/failure.hpp"
#include "engine/file.hpp"
#include "engine/host_copy.hpp"

namespace gdrkit::engine {

enum class Direction { read, write };
// How files are accessed. `buffered` uses the page cache and `direct` uses O_DIRECT. `automatic` reads a range with
// O_DIRECT if less than half of it is in the page cache, and writes through the page cache.
enum class Access { automatic, buffered, direct };

// Device number that stands for host memory.
inline constexpr int host_memory = -1;

// Settings of the engine. The defaults were the fastest values in the measurements of reports/baselines. The public
// form of these settings is gdrkit.gds.EngineOptions.
struct Tuning {
    std::size_t workers_count = 12;
    std::size_t buffers_count = 2;         // Number of staging buffers of each worker.
    std::uint64_t chunk_bytes = 4U << 20U; // Largest size of a chunk, and the size of a staging buffer.
    // Size of the first and of the last chunks of a job. The chunks between them are larger, up to chunk_bytes.
    std::uint64_t first_chunk_bytes = 512U << 10U;
    // Size of a coalesced copy (see coalesced_copy.hpp). With a size up to chunk_bytes, the engine makes no coalesced
    // copies.
    std::uint64_t coalesced_bytes = 8U << 20U;
    std::size_t coalesced_count = 6;               // Number of buffers for coalesced copies, for all workers together.
    std::uint64_t slice_bytes = 1U << 20U;         // Part of a coalesced copy that one worker fills at a time.
    bool polls_device = true;                      // See CopyStream::wait.
    std::size_t direct_readers_count = 2;          // Concurrent O_DIRECT reads of one job.
    std::uint64_t direct_read_bytes = 4U << 20U;   // Length of such a read of a long extent.
    std::size_t direct_writers_count = 2;          // Concurrent O_DIRECT writes of one job.
    std::uint64_t direct_write_bytes = 16U << 20U; // Length of such a write of a long extent.
    std::size_t buffered_writers_count = 2;        // Concurrent writes into the page cache for one job.
    // Ranges below this size use the page cache, except reads of a job whose access is `direct`.
    std::uint64_t direct_min_bytes = 256U << 10U;
};

// Extra space of a staging buffer, in bytes, for the partial blocks of parts that begin or end inside a block.
inline constexpr std::uint64_t slack_bytes = 256U << 10U;

// One range of a file, and the memory to or from which the job moves it.
struct Extent {
    std::uint32_t file_index = 0; // Index in the files of the job.
    std::uint64_t offset = 0;     // Offset in the file.
    std::uint64_t address = 0;    // Device address or host address.
    std::uint64_t length = 0;
    // Offset in the extent of the first byte that did not arrive. UINT64_MAX if no byte is missing so far.
    std::uint64_t first_missing_offset = UINT64_MAX;
};

// The part of one extent that belongs to a chunk.
struct Part {
    std::uint32_t extent_index = 0;  // Index in the extents of the job.
    std::uint64_t extent_offset = 0; // Offset of the part in the extent.
    std::uint64_t length = 0;
    std::uint64_t done_bytes = 0;     // Bytes that were moved, from the beginning of the part.
    std::uint64_t staging_offset = 0; // Offset in the staging buffer of the chunk.
    bool is_direct = false;           // The I/O bypasses the page cache (O_DIRECT).
};

class CoalescedCopy;
class Job;

// The work that a worker takes at a time: parts of one or more extents of a job, or one slice of a coalesced copy.
struct Chunk {
    std::shared_ptr<Job> job;
    std::vector<Part> parts;
    std::uint64_t bytes = 0; // Sum of the lengths of the parts.
    // The chunk belongs to a long extent and is moved with O_DIRECT. For short extents, see Part::is_direct.
    bool is_direct = false;
    // A job limits how many workers read or write with O_DIRECT, or write to the page cache, at the same time. For such
    // work, a worker needs a reservation, which it gets together with the chunk.
    bool holds_reservation = false;
    bool opens_coalesced_copy = false; // The worker that takes the chunk opens a coalesced copy for it.
    // If `coalesced_copy` is set, the work is to fill one slice of this copy, and the members above are not used.
    std::shared_ptr<CoalescedCopy> coalesced_copy;
    std::size_t slice_index = 0;
};

// The state of a job that is running, or the result of a job that is over.
struct Progress {
    std::uint64_t bytes = 0;             // Bytes that arrived.
    std::uint64_t direct_bytes = 0;      // Part of `bytes` that O_DIRECT moved.
    bool is_cancelled = false;           // The job was cancelled before all chunks were started.
    std::optional<Failure> failure;      // The first failure.
    std::uint32_t failed_extent = 0;     // Index of the extent of this failure.
    int direct_open_errno = 0;           // The errno with which O_DIRECT failed, or 0.
    std::chrono::nanoseconds duration{}; // Time from the creation of the job to its end. Valid when the job is over.
};

// Totals of all jobs and small transfers (Engine::transfer_small) of this process that are over.
struct Totals {
    std::atomic<std::uint64_t> transfers_count{0};
    std::atomic<std::uint64_t> arrived_bytes{0};
    void add(std::uint64_t bytes) noexcept {
        arrived_bytes.fetch_add(bytes, std::memory_order_relaxed);
        transfers_count.fetch_add(1, std::memory_order_relaxed);
    }
};
inline Totals totals;

// The result of a request for work. `busy` means that work is left, but this worker cannot take it now.
enum class TakeResult { nothing, busy, chunk };

class Job {
public:
    // If `is_durable` is set, the job syncs the files to the disk before it is over. The job uses its files from its
    // construction until it is over, so a job that is never submitted must be cancelled.
    Job(Direction direction, Access access, int device, std::vector<std::shared_ptr<File>> files,
        std::vector<Extent> extents, const Tuning& tuning, bool is_durable = false);

    Direction direction() const noexcept { return direction_; }
    Access access() const noexcept { return access_; }
    int device() const noexcept { return device_; }
    const Extent& extent(const Part& part) const noexcept { return extents_[part.extent_index]; }
    File& file(const Part& part) noexcept { return *files_[extents_[part.extent_index].file_index]; }
    // Approximate number of chunks that the job will have.
    std::size_t chunks_count() const noexcept { return chunks_count_; }

    // Takes the next chunk. Returns `busy` if a chunk is left, but all reservations are in use. Also returns `busy` if
    // the chunk needs a coalesced copy while another worker opens one. If take() cannot open or query a file, it stores
    // the failure and starts no further chunks.
    //
    // `is_copy_opening` tells whether a worker opens a coalesced copy. All jobs share this flag. take() sets it when it
    // returns a chunk that needs a coalesced copy. Dispatcher::publish clears it.
    TakeResult take(Chunk& chunk, std::atomic<bool>& is_copy_opening);
    // Releases the reservation of a chunk, if it has one, so that another worker may start file I/O.
    void release_reservation(Chunk& chunk);
    // Releases one reservation that a worker has kept from an earlier chunk.
    void release_reservation();
    // Reports that the work on a chunk is over. `done_bytes` of each part is the number of its bytes that arrived.
    // `direct_bytes` is the number of bytes of the chunk that O_DIRECT moved.
    void complete(Chunk& chunk, std::uint64_t direct_bytes);
    // Stores the failure, unless an earlier failure is stored, and starts no further chunks.
    void fail(std::uint32_t extent_index, Failure failure);
    // Starts no further chunks. Chunks in progress complete.
    void cancel();

    Completion& completion() noexcept { return completion_; }
    // Waits at most `timeout_us`, or without limit if it is negative. Returns whether the job is over.
    bool wait(std::int64_t timeout_us);
    // is_over() and the functions below take no lock when the job is over.
    bool is_over() const noexcept { return completion_.is_over(); }
    // Adds the token to the queue when the job is over, or at once if the job is already over.
    void notify(std::shared_ptr<CompletionQueue> queue, std::uint64_t token) {
        completion_.notify(std::move(queue), token);
    }
    Progress progress();
    // Returns for each extent the number of bytes that arrived from its beginning without a gap. Valid when the job is
    // over.
    std::vector<std::uint64_t> arrived_bytes();

private:
    // The callers of these functions hold mutex_, except the callers of make_durable() and lock_unless_over().
    bool is_next_direct(Extent& extent);
    TakeResult take_from_long_extent(Chunk& chunk, Extent& extent, std::atomic<bool>& is_copy_opening);
    void take_short_extents(Chunk& chunk);
    std::uint64_t next_chunk_bytes() const;
    std::uint64_t next_coalesced_bytes() const;
    std::size_t reservations_max(bool is_direct) const;
    std::size_t sharing_workers_count() const;
    // Advances next_extent_index_ and next_offset_ to the next bytes that are not taken.
    void skip_taken_extents();
    bool is_work_finished_locked() const {
        return chunks_in_progress_ == 0 && (is_stopped_ || next_extent_index_ == extents_.size());
    }
    std::optional<Failure> make_durable();
    std::unique_lock<std::mutex> lock_unless_over();
    void end_locked();

    const Direction direction_;
    const Access access_;
    const int device_;
    const Tuning tuning_;
    const std::vector<std::shared_ptr<File>> files_;
    std::vector<Extent> extents_;
    const bool is_durable_;
    std::uint64_t total_bytes_ = 0;
    std::uint64_t chunk_min_bytes_ = 0; // Smallest size of a chunk, unless fewer bytes are left to take.
    std::size_t chunks_count_ = 0;

    std::mutex mutex_;
    std::uint32_t next_extent_index_ = 0; // Index of the first extent that is not taken completely.
    std::uint64_t next_offset_ = 0;       // Number of bytes of this extent that are taken.
    std::uint64_t taken_bytes_ = 0;
    // take() chooses between O_DIRECT and the page cache for one window of a long extent at a time.
    std::uint64_t window_end_ = 0; // Offset in the extent of the end of the current window.
    bool is_window_direct_ = false;
    std::size_t chunks_in_progress_ = 0;
    std::size_t reservations_count_ = 0;
    bool is_stopped_ = false;
    Completion completion_;
    const std::chrono::steady_clock::time_point begin_time_ = std::chrono::steady_clock::now();
    Progress progress_;
};

} // namespace gdrkit::engine
