// A job: the ranges of files of one call and their memory, which workers take in pieces, in order.
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
    std::size_t slots_count = 2;             // Staging buffers of each worker.
    std::uint64_t piece_bytes = 4U << 20U;   // Size of a staging buffer.
    std::uint64_t first_bytes = 512U << 10U; // Pieces grow from this and shrink to it; piece_bytes: all have one size.
    std::uint64_t haul_bytes = 8U << 20U;    // Size of a coalesced copy; at most piece_bytes: there are none.
    std::size_t hauls_count = 6;             // Number of coalesced copies of all workers.
    std::uint64_t load_bytes = 1U << 20U;    // What one worker fills at a time.
    bool sleeps_until_asked = true;          // How a thread waits for a device: see Lane::wait.
    std::size_t direct_readers_count = 2;    // Concurrent O_DIRECT reads of one job,
    std::uint64_t direct_read_bytes = 4U << 20U; // and the size of each.
    std::size_t direct_writers_count = 2;        // Concurrent O_DIRECT writes of one job.
    std::uint64_t direct_write_bytes = 16U << 20U;
    std::size_t buffered_writers_count = 2;         // Concurrent writes into the page cache for one job.
    std::uint64_t direct_least_bytes = 256U << 10U; // Shorter ranges are read through the page cache.
};

struct Extent {
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t address = 0; // Device address or host address.
    std::uint64_t length = 0;
    std::uint64_t stop = UINT64_MAX; // Offset in the extent of the first byte that did not arrive.
};

struct Part {
    std::uint32_t extent = 0;
    std::uint64_t at = 0;
    std::uint64_t length = 0;
    std::uint64_t done = 0;
    std::uint64_t where = 0; // Offset in the staging memory of the piece,
    bool direct = false;     // and whether it bypasses the page cache.
};

class Haul;
class Job;

struct Piece {
    std::shared_ptr<Job> job;
    std::vector<Part> parts;
    std::uint64_t bytes = 0;
    bool direct = false;
    bool limited = false; // Counts against the limit of O_DIRECT users or of buffered writers.
    bool hauled = false;  // The worker that takes it opens a coalesced copy.
    // If `haul` is set, the piece is instead one chunk of a coalesced copy, which is to be filled.
    std::shared_ptr<Haul> haul;
    std::size_t load = 0;
};

struct Progress {
    std::uint64_t bytes = 0;        // Bytes that arrived.
    std::uint64_t direct_bytes = 0; // The part of them that used O_DIRECT.
    bool cancelled = false;         // Cancelled before all pieces were started.
    std::optional<Failure> failure; // The first failure.
    std::uint32_t failed_extent = 0;
    int direct_refusal = 0; // The errno with which the file system refused O_DIRECT.
};

enum class Taken { nothing, busy, piece };

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
    // Approximate number of workers that have something to do in this job.
    std::size_t pieces_count() const noexcept { return pieces_count_; }

    // Takes the next piece. `busy` means that a piece is left, but too many workers are active, or another worker opens
    // a coalesced copy (`opening`). `opening` is set if this piece needs one. A failure to start a piece ends the job.
    Taken take(Piece& piece, std::atomic<bool>& opening);
    // The file I/O of a limited piece is over, so another worker may start one.
    void release(Piece& piece);
    // Same as `release`, for a worker that has kept the reservation of a piece.
    void release_place();
    // Every byte of the piece has arrived or never will. The `done` of its parts says which.
    void settle(Piece& piece, std::uint64_t direct_bytes);
    // Stores a failure and starts no further pieces. Only the first failure is kept.
    void fail(std::uint32_t extent, Failure failure);
    void cancel();

    // Waits at most this time, or without limit if it is negative. Returns whether the job is over.
    bool wait(std::int64_t timeout_us);
    bool is_over();
    Progress progress();
    // Bytes of each extent that arrived from its beginning without a gap. Valid when the job is over.
    std::vector<std::uint64_t> arrived();

private:
    bool look_ahead(Extent& extent);
    Taken take_large(Piece& piece, Extent& extent, std::atomic<bool>& opening);
    void take_small(Piece& piece);
    std::uint64_t grain() const;
    std::uint64_t haul_grain() const;
    std::size_t limit_of(bool direct) const;
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
    std::uint64_t whole_bytes_ = 0;
    std::uint64_t least_bytes_ = 0; // Least size of a piece, if the extent has as many bytes.
    std::size_t pieces_count_ = 0;

    std::mutex mutex_;
    std::condition_variable over_changed_;
    std::uint32_t next_ = 0;    // The first extent that is not taken completely,
    std::uint64_t next_at_ = 0; // and how much of it is taken.
    std::uint64_t taken_bytes_ = 0;
    std::uint64_t window_end_ = 0;   // `window_direct_` is valid up to this offset in the extent.
    std::uint64_t window_bytes_ = 0; // Size of the last window whose cache state was queried.
    bool window_direct_ = false;
    std::size_t in_flight_ = 0;
    std::size_t limited_ = 0;
    bool stopped_ = false;
    bool over_ = false;
    Progress progress_;
};

} // namespace gdrkit::engine
