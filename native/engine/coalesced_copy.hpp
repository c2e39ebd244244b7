// Coalesced copies to a device, which several workers fill together.
//
// A device pauses for about 3 us between two copies, whatever their size. On a fast bus this is 4 % of the time with
// copies of 4 MiB, and 2 % with copies of 8 MiB. So larger copies are faster, but a single worker needs a millisecond
// to fill 8 MiB. If each worker filled a separate copy, the staging memory of all workers would not fit into the
// processor caches, and each copy would need twice the memory bandwidth. So one worker opens a coalesced copy, all
// workers fill slices of it, and the worker that fills the last slice submits it.
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

#include "engine/copy_stream.hpp"
#include "engine/host_copy.hpp"
#include "engine/job.hpp"
#include "engine/staging.hpp"

namespace gdrkit::engine {

// A chunk that several workers read from the file, one slice each at a time, and that one CUDA copy moves to the
// device.
class CoalescedCopy {
public:
    CoalescedCopy(Chunk&& chunk, std::size_t buffer_index, std::byte* buffer, std::uint64_t slice_bytes);

    // Claims the next slice that no worker has claimed, and stores it in `chunk`. Returns false if no slice is left.
    static bool claim(const std::shared_ptr<CoalescedCopy>& copy, Chunk& chunk);
    std::size_t slice_count() const noexcept { return slice_results_.size(); }

private:
    friend class CoalescedCopies;
    // The chunk of a coalesced copy has exactly one part.
    Part& part() noexcept { return chunk_.parts.front(); }

    Chunk chunk_;
    const std::size_t buffer_index_;
    std::byte* const buffer_;
    const std::uint64_t slice_bytes_;
    std::vector<IoResult> slice_results_; // One result for each slice. The worker that submits the copy reads them all.
    std::atomic<std::size_t> claimed_slices_count_{0};
    std::atomic<std::size_t> unfilled_slices_count_;
};

// The buffers of coalesced copies, and the copies in progress on devices.
class CoalescedCopies {
public:
    // `slab` is staging memory with space for all buffers.
    CoalescedCopies(PrimaryContexts& contexts, Staging& staging, std::byte* slab, const Tuning& tuning);

    // Returns a flag that is set while a worker opens a coalesced copy. Meanwhile the other workers open no copy, and
    // wait for the slices of this copy.
    std::atomic<bool>& is_copy_opening() noexcept { return is_copy_opening_; }
    // Turns a chunk into a coalesced copy. Waits for the oldest copy if no buffer is free. If the device cannot be
    // used, throws Error and leaves the chunk unchanged.
    std::shared_ptr<CoalescedCopy> open(Chunk& chunk);
    // Reads the slice of `chunk` from the file. Submits the copy if this was its last unfilled slice.
    void fill(const Chunk& chunk);
    // Returns whether a copy was submitted to a device and is not completed.
    bool is_any_submitted() const noexcept { return submitted_count_.load(std::memory_order_relaxed) != 0; }
    // Completes the oldest submitted copy. If `is_blocking` is set, waits for the copy. Returns false if no copy was
    // completed.
    bool complete_oldest(bool is_blocking);
    // Destroys streams and events. No copy may be in progress.
    void close();

private:
    // Returns the stream for a device and makes its context current. Creates the stream at the first use.
    CopyStream& activate_stream(int device);
    // Returns the existing stream of a submitted copy. Calls no CUDA function, so that it also works after a CUDA
    // failure.
    const CopyStream& submitted_stream(int device);
    // Returns the index of a free buffer. If there is none, completes the oldest copy, or waits for another worker.
    std::size_t take_buffer_index();
    // Starts the copy of the filled slices to the device.
    void submit(const std::shared_ptr<CoalescedCopy>& copy);
    // Waits for the copy and reports its result to the job. If the query of the copy's event has failed,
    // `query_failure` is set, and the function does not wait for the event.
    void finish(CoalescedCopy& copy, const std::optional<Failure>& query_failure);
    // Frees the buffer and tells the job that the chunk is complete.
    void release(CoalescedCopy& copy);

    PrimaryContexts& contexts_;
    Staging& staging_;
    std::byte* const slab_;
    const Tuning tuning_;
    std::atomic<bool> is_copy_opening_{false};
    std::atomic<std::size_t> submitted_count_{0};
    std::mutex mutex_;                        // Protects the members below.
    std::condition_variable buffers_changed_; // A buffer was freed or a copy was submitted.
    std::vector<std::size_t> free_buffers_;
    std::deque<std::shared_ptr<CoalescedCopy>> submitted_copies_; // In the order of their submission.
    std::map<int, std::unique_ptr<CopyStream>> streams_;          // The keys are the devices.
};

} // namespace gdrkit::engine
