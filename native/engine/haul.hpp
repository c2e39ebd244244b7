// Long copies to a device that several workers load together.
//
// Between two copies a device pauses for about 3 us, whatever they carry: that is 4 % of a fast bus with 4 MiB each,
// and 2 % with 8 MiB. A worker alone would need a millisecond to load 8 MiB, and the staging memory of all of them
// would not stay in the cache of the processors, without which a copy costs twice the memory's time. So one worker
// opens a haul, all load parts of it, and who is last sends it off.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/host_copy.hpp"
#include "engine/job.hpp"
#include "engine/lane.hpp"
#include "engine/staging.hpp"

namespace gdrkit::engine {

class Haul {
public:
    Haul(Piece&& piece, std::size_t slot, std::byte* at, std::uint64_t load_bytes);

    // The next part that nobody loads yet, as a piece of the haul; false when there is none.
    static bool claim(const std::shared_ptr<Haul>& haul, Piece& piece);
    std::size_t loads_count() const noexcept { return moved_.size(); }

private:
    friend class Hauls;
    Part& part() noexcept { return piece_.parts.front(); }

    Piece piece_;
    const std::size_t slot_;
    std::byte* const at_;
    const std::uint64_t load_bytes_;
    std::vector<Moved> moved_; // Of each load; whoever sends the haul sees them all.
    std::atomic<std::size_t> claimed_{0};
    std::atomic<std::size_t> missing_;
};

// The staging memory of hauls, and those that a device copies now.
class Hauls {
public:
    // `slab` has room for all of them.
    Hauls(Contexts& contexts, Staging& staging, std::byte* slab, const Tuning& tuning);

    // Taken by who opens a haul, until it can be claimed: the others wait for its parts instead of opening more.
    std::atomic<bool>& opening() noexcept { return opening_; }
    // Makes a haul of a piece, in memory that is free or will be: waits for the oldest that is copied. Throws Error:
    // there is no device; the piece is as it was.
    std::shared_ptr<Haul> open(Piece& piece);
    // Reads one part; sends the haul when it was the last one.
    void load(const Piece& piece);
    // Whether devices copy any.
    bool is_any_copied() const noexcept { return copied_count_.load(std::memory_order_relaxed) != 0; }
    // Settles the oldest haul that is copied; false: there is none, or, unless `waits`, it is not done.
    bool retire(bool waits);
    // Gives streams and events back; nothing is copied any more.
    void close();

private:
    Lane& lane_of(int device);
    std::size_t free_slot();
    void send(const std::shared_ptr<Haul>& haul);
    // Waits for the device, unless it has `refused` already to say whether it is done.
    void settle(Haul& haul, const std::optional<Failure>& refused);
    void free(Haul& haul);

    Contexts& contexts_;
    Staging& staging_;
    std::byte* const slab_;
    const Tuning tuning_;
    std::atomic<bool> opening_{false};
    std::atomic<std::size_t> copied_count_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::size_t> free_;
    std::deque<std::shared_ptr<Haul>> copied_; // In the order in which they were sent.
    std::map<int, std::unique_ptr<Lane>> lanes_;
};

} // namespace gdrkit::engine
