// Coalesced copies to a device, which several workers fill together.
//
// Between two copies a device pauses for about 3 us, whatever their size: that is 4 % of the time of a fast bus with
// copies of 4 MiB, and 2 % with 8 MiB. A single worker would need a millisecond to fill 8 MiB. The staging memory of
// all workers would then not stay in the processor caches, and a copy would take twice the memory bandwidth. So one
// worker opens a coalesced copy, all workers fill chunks of it, and the worker that finishes last submits it.
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

    // Claims the next chunk that no worker fills yet, as a piece of the coalesced copy. Returns false if there is none.
    static bool claim(const std::shared_ptr<Haul>& haul, Piece& piece);
    std::size_t loads_count() const noexcept { return moved_.size(); }

private:
    friend class Hauls;
    Part& part() noexcept { return piece_.parts.front(); }

    Piece piece_;
    const std::size_t slot_;
    std::byte* const at_;
    const std::uint64_t load_bytes_;
    std::vector<Moved> moved_; // One per chunk. The worker that submits the copy reads them all.
    std::atomic<std::size_t> claimed_{0};
    std::atomic<std::size_t> missing_;
};

// The buffers of coalesced copies, and the copies in progress on devices.
class Hauls {
public:
    // `slab` must have space for all buffers.
    Hauls(Contexts& contexts, Staging& staging, std::byte* slab, const Tuning& tuning);

    // Set by the worker that opens a coalesced copy, until others can claim its chunks. They wait instead of opening
    // more.
    std::atomic<bool>& opening() noexcept { return opening_; }
    // Turns a piece into a coalesced copy, in a free buffer, or in that of the oldest copy, for which it waits. Throws
    // Error if there is no device; the piece is then unchanged.
    std::shared_ptr<Haul> open(Piece& piece);
    // Reads one chunk, and submits the copy if the chunk was the last one.
    void load(const Piece& piece);
    // Returns whether a copy is in progress on a device.
    bool is_any_copied() const noexcept { return copied_count_.load(std::memory_order_relaxed) != 0; }
    // Settles the oldest copy. Returns false if there is none, or if it is not done and `waits` is false.
    bool retire(bool waits);
    // Destroys streams and events. No copy may be in progress.
    void close();

private:
    Lane& lane_of(int device);
    // The lane of a haul that was sent, which is there. Nothing of CUDA is called, so that it can be drained whatever
    // CUDA refuses.
    const Lane& lane_that_sent(int device);
    std::size_t free_slot();
    void send(const std::shared_ptr<Haul>& haul);
    // Waits for the device, unless `refused` is set: the query whether the copy is done has failed.
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
    std::deque<std::shared_ptr<Haul>> copied_; // In the order of their submission.
    std::map<int, std::unique_ptr<Lane>> lanes_;
};

} // namespace gdrkit::engine
