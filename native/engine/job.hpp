// A job: the ranges of files of one call and their memory, which workers take in chunks, in order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/failure.hpp"
#include "engine/file.hpp"
#include "engine/host_copy.hpp"

namespace gdrkit::engine {

enum class Direction { read, write };
// The I/O path of files: chosen by the page cache (reads) or by speed (writes), or given by the caller.
enum class Access { automatic, buffered, direct };

inline constexpr int host_memory = -1;

// Settings with the fastest values of the measurements in reports/baselines; see gdrkit.gds.EngineOptions.
struct Tuning {
    std::size_t workers_count = 12;
    std::size_t buffers_count = 2;         // Staging buffers of each worker.
    std::uint64_t chunk_bytes = 4U << 20U; // Largest size of a chunk, and the size of a staging buffer.
    // Size of the first and of the last chunks of a job. Between them the chunks are larger, up to chunk_bytes.
    std::uint64_t first_chunk_bytes = 512U << 10U;
    std::uint64_t coalesced_bytes = 8U << 20U; // Size of a coalesced copy. There are none if it is at most chunk_bytes.
    std::size_t coalesced_count = 6;           // Number of buffers for coalesced copies, for all workers together.
    std::uint64_t slice_bytes = 1U << 20U;     // Part of a coalesced copy that one worker fills at a time.
    bool polls_device = true;                  // How a thread waits for a device: see CopyStream::wait.
    std::size_t direct_readers_count = 2;      // Concurrent O_DIRECT reads of one job.
    std::uint64_t direct_read_bytes = 4U << 20U;
    std::size_t direct_writers_count = 2; // Concurrent O_DIRECT writes of one job.
    std::uint64_t direct_write_bytes = 16U << 20U;
    std::size_t buffered_writers_count = 2; // Concurrent writes into the page cache for one job.
    // Shorter ranges use the page cache, except reads of a job whose access is `direct`.
    std::uint64_t direct_min_bytes = 256U << 10U;
};

// Extra space of a staging buffer, in bytes, for the partial blocks of parts that begin or end inside a block.
inline constexpr std::uint64_t slack_bytes = 256U << 10U;

// One range of a file and its memory.
struct Extent {
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t address = 0; // Device address or host address.
    std::uint64_t length = 0;
    std::uint64_t stop = UINT64_MAX; // Offset in the extent of the first byte that did not arrive.
};

// The part of one extent that belongs to a chunk.
struct Part {
    std::uint32_t extent = 0;
    std::uint64_t extent_offset = 0;
    std::uint64_t length = 0;
    std::uint64_t done_bytes = 0; // Bytes that were moved, from the beginning of the part.
    std::uint64_t staging_offset = 0;
    bool direct = false; // Bypasses the page cache.
};

class CoalescedCopy;
class Job;

// The work that a worker takes at a time: parts of one or more extents of a job, or one slice of a coalesced copy.
struct Chunk {
    std::shared_ptr<Job> job;
    std::vector<Part> parts;
    std::uint64_t bytes = 0;
    bool direct = false;
    bool is_reserved = false;  // Holds one of the job's reservations for O_DIRECT users or buffered writers.
    bool is_coalesced = false; // The worker that takes the chunk opens a coalesced copy for it.
    // If `copy` is set, the work is to fill slice number `slice` of this copy, and the members above are not used.
    std::shared_ptr<CoalescedCopy> copy;
    std::size_t slice = 0;
};

struct Progress {
    std::uint64_t bytes = 0;        // Bytes that arrived.
    std::uint64_t direct_bytes = 0; // The part of them that used O_DIRECT.
    bool cancelled = false;         // Cancelled before all chunks were started.
    std::optional<Failure> failure; // The first failure.
    std::uint32_t failed_extent = 0;
    int direct_refusal = 0; // The errno with which the file system refused O_DIRECT.
};

// The result of a request for work. `busy`: there is work, but not for this worker now.
enum class TakeResult { nothing, busy, chunk };

class Job {
public:
    // With `durable`, a write is complete when the data is on the disk.
    Job(Direction direction, Access access, int device, std::vector<std::shared_ptr<File>> files,
        std::vector<Extent> extents, const Tuning& tuning, bool durable = false);

    Direction direction() const noexcept { return direction_; }
    Access access() const noexcept { return access_; }
    int device() const noexcept { return device_; }
    const Extent& extent(const Part& part) const noexcept { return extents_[part.extent]; }
    File& file(const Part& part) noexcept { return *files_[extents_[part.extent].file]; }
    // Approximate number of chunks that the job will have.
    std::size_t chunks_count() const noexcept { return chunks_count_; }

    // Takes the next chunk. `busy` means that a chunk is left, but too many workers are active, or another worker opens
    // a coalesced copy (`is_opening`). `is_opening` is set if this chunk needs one. A failure to start a chunk ends the
    // job.
    TakeResult take(Chunk& chunk, std::atomic<bool>& is_opening);
    // Releases the reservation of a chunk, if it has one, so that another worker may start file I/O.
    void release_reservation(Chunk& chunk);
    // Releases one reservation that a worker has taken over from a chunk.
    void release_reservation();
    // Reports that every byte of the chunk has arrived or never will; `done_bytes` of each part is the number that
    // arrived.
    void complete(Chunk& chunk, std::uint64_t direct_bytes);
    // Stores the failure, if it is the first one. No further chunks are started.
    void fail(std::uint32_t extent, Failure failure);
    void cancel();

    // Waits at most this time, or without limit if it is negative. Returns whether the job is over.
    bool wait(std::int64_t timeout_us);
    bool is_over();
    Progress progress();
    // Bytes of each extent that arrived from its beginning without a gap. Valid when the job is over.
    std::vector<std::uint64_t> arrived();

private:
    bool is_next_direct(Extent& extent);
    TakeResult take_large(Chunk& chunk, Extent& extent, std::atomic<bool>& is_opening);
    void take_small(Chunk& chunk);
    std::uint64_t next_chunk_bytes() const;
    std::uint64_t next_coalesced_bytes() const;
    std::size_t reservations_max(bool direct) const;
    void skip_empty();
    bool is_last_unlocked() const { return in_flight_ == 0 && (stopped_ || next_ == extents_.size()); }
    std::optional<Failure> make_durable();
    void end_unlocked();

    const Direction direction_;
    const Access access_;
    const int device_;
    const Tuning tuning_;
    const std::vector<std::shared_ptr<File>> files_;
    std::vector<Extent> extents_;
    const bool durable_;
    std::uint64_t total_bytes_ = 0;
    std::uint64_t chunk_min_bytes_ = 0; // Least size of a chunk, if the extent has as many bytes.
    std::size_t chunks_count_ = 0;

    std::mutex mutex_;
    std::condition_variable over_changed_;
    std::uint32_t next_ = 0;        // Index of the first extent that is not taken completely.
    std::uint64_t next_offset_ = 0; // Bytes of it that are taken.
    std::uint64_t taken_bytes_ = 0;
    std::uint64_t window_end_ = 0;   // `window_direct_` is valid up to this offset in the extent.
    std::uint64_t window_bytes_ = 0; // Size of the last window whose cache state was queried.
    bool window_direct_ = false;
    std::size_t in_flight_ = 0;
    std::size_t reservations_ = 0;
    bool stopped_ = false;
    bool over_ = false;
    Progress progress_;
};

} // namespace gdrkit::engine
