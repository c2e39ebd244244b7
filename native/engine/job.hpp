// What one call asked for: ranges of files and where their bytes go, handed out in pieces, in order.
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
// How files are reached: by what is cached (reads) or what is faster (writes), or as the caller says.
enum class Access { automatic, buffered, direct };

inline constexpr int host_memory = -1;

// What was fastest where it was measured (reports/baselines); gdrkit.gds.EngineOptions says the same to Python.
struct Tuning {
    std::size_t workers_count = 12;
    std::size_t slots_count = 2;                 // Of each worker.
    std::uint64_t piece_bytes = 4U << 20U;       // Of a slot.
    std::uint64_t first_bytes = 512U << 10U;     // Pieces grow from this and shrink to it; piece_bytes: none does.
    std::uint64_t haul_bytes = 8U << 20U;        // What workers load together; at most piece_bytes: nothing.
    std::size_t hauls_count = 6;                 // Of all workers.
    std::uint64_t load_bytes = 1U << 20U;        // What one of them loads at a time.
    bool sleeps_until_asked = true;              // How a thread waits for a device: see Lane::wait.
    std::size_t direct_readers_count = 2;        // Which read by O_DIRECT at the same time, for one job,
    std::uint64_t direct_read_bytes = 4U << 20U; // and how much at a time.
    std::size_t direct_writers_count = 2;        // The same for writes.
    std::uint64_t direct_write_bytes = 16U << 20U;
    std::size_t buffered_writers_count = 2;         // Which write to cached pages at the same time, for one job.
    std::uint64_t direct_least_bytes = 256U << 10U; // Shorter ranges are read by way of the cache.
};

struct Extent {
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t address = 0; // Of the device, or of the host.
    std::uint64_t length = 0;
    std::uint64_t stop = UINT64_MAX; // The first byte that did not arrive, from the beginning of the extent.
};

struct Part {
    std::uint32_t extent = 0;
    std::uint64_t at = 0;
    std::uint64_t length = 0;
    std::uint64_t done = 0;
    std::uint64_t where = 0; // In the staging memory of its piece,
    bool direct = false;     // and whether it passes the page cache by.
};

class Haul;
class Job;

struct Piece {
    std::shared_ptr<Job> job;
    std::vector<Part> parts;
    std::uint64_t bytes = 0;
    bool direct = false;
    bool limited = false; // Counts among those who read or write by O_DIRECT, or the buffered writers.
    bool hauled = false;  // Of several workers: who took it opens a haul.
    // Or, instead of all that, a part of a haul which is to be loaded.
    std::shared_ptr<Haul> haul;
    std::size_t load = 0;
};

struct Progress {
    std::uint64_t bytes = 0;        // Which arrived.
    std::uint64_t direct_bytes = 0; // Of these, by O_DIRECT.
    bool cancelled = false;         // Before everything had been begun.
    std::optional<Failure> failure; // The first.
    std::uint32_t failed_extent = 0;
    int direct_refusal = 0; // The errno with which a file system refused O_DIRECT.
};

enum class Taken { nothing, busy, piece };

class Job {
public:
    // `durable`: a write is over when the disk has it.
    Job(Direction direction, Access access, int device, std::vector<std::shared_ptr<File>> files,
        std::vector<Extent> extents, const Tuning& tuning, bool durable = false);

    Direction direction() const noexcept { return direction_; }
    Access access() const noexcept { return access_; }
    int device() const noexcept { return device_; }
    const Extent& extent(const Part& part) const noexcept { return extents_[part.extent]; }
    File& file(const Part& part) noexcept { return *files_[extents_[part.extent].file]; }
    // About how many workers have something to do here.
    std::size_t pieces_count() const noexcept { return pieces_count_; }

    // The next piece; `busy`: there is one, for which too many are at work, or which is to be hauled while somebody
    // has `opening`, which is set where it is not. A failure to begin one ends the job.
    Taken take(Piece& piece, std::atomic<bool>& opening);
    // The file's part of a limited piece is over: another may begin.
    void release(Piece& piece);
    // As `release`, for who has kept the place of a piece.
    void release_place();
    // Every byte of the piece has arrived or never will; `done` of its parts says which.
    void settle(Piece& piece, std::uint64_t direct_bytes);
    // Something went wrong: nothing new is begun. The first failure is kept.
    void fail(std::uint32_t extent, Failure failure);
    void cancel();

    // Whether it was over within the time; negative: as long as it takes.
    bool wait(std::int64_t timeout_us);
    bool is_over();
    Progress progress();
    // How many bytes of each extent arrived, from its beginning without a gap; once it is over.
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
    std::uint64_t least_bytes_ = 0; // Of a piece, where the extent has as many.
    std::size_t pieces_count_ = 0;

    std::mutex mutex_;
    std::condition_variable over_changed_;
    std::uint32_t next_ = 0;    // The first extent that is not wholly taken,
    std::uint64_t next_at_ = 0; // and how much of it is.
    std::uint64_t taken_bytes_ = 0;
    std::uint64_t window_end_ = 0;   // Up to here in the extent, `window_direct_` says how it is read.
    std::uint64_t window_bytes_ = 0; // How much was looked at together last.
    bool window_direct_ = false;
    std::size_t in_flight_ = 0;
    std::size_t limited_ = 0;
    bool stopped_ = false;
    bool over_ = false;
    Progress progress_;
};

} // namespace gdrkit::engine
