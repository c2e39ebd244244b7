// Copies between the memory of this process and a peer's memory, with process_vm_readv and process_vm_writev. A thread
// that has nothing else to do can take part in a large copy of another thread.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

namespace gdrkit::twin::verbs {

// A copy of `size_bytes` bytes between this process and another one.
struct PeerCopy {
    int process_id;
    bool is_read; // false: write to the memory of the other process
    std::byte* local_address;
    std::uint64_t remote_address;
    std::size_t size_bytes;
};

// Carry out a copy, from the first byte to the last. Return false if the memory of either process is not mapped or the
// other process has ended; a part may be copied then. No signal is raised.
bool copy_with_peer(const PeerCopy& copy);

// Copy between lists of ranges by one system call. Each local range has the size of the remote range with the same
// index. Return false as copy_with_peer does.
bool copy_lists_with_peer(int process_id, bool is_read, std::span<const iovec> local_ranges,
                          std::span<const iovec> remote_ranges);

// A copy in which several threads take part.
class ParallelCopy {
public:
    // Carry out a copy as copy_with_peer does. Only one thread at a time may call this function. The last bytes are
    // copied after all others, because programs poll the last byte of a message that a peer writes.
    bool run(const PeerCopy& copy);
    // Take part in the copy that another thread runs, if any. Do nothing if this thread has recently waited for a
    // processor.
    void help();
    // Call sched_yield, unless another thread has recently kept the processor for a whole time slice. If another thread
    // keeps the processor for long, help() regards this thread as one that waits for a processor.
    static void yield_processor();

private:
    using Clock = std::chrono::steady_clock;

    // The thread that runs the copy takes pieces from the start of the range, and other threads take them from the end.
    // So if a buffer is copied many times, each processor copies the same part of it again, which is still in its
    // cache.
    //
    // The kernel first pins all pages of a piece, and takes the lock of their page table for each page. If two threads
    // do this at the same time, a copy takes longer than with one thread. So a thread begins a piece when the other
    // thread is halfway through its own.
    bool copy_next_piece(bool from_end);

    std::mutex mutex_;
    PeerCopy copy_{};
    std::size_t begin_offset_ = 0, end_offset_ = 0; // the part that no thread has taken
    Clock::time_point next_begin_at_{};             // the earliest time at which a thread begins the next piece
    // Time between the starts of two pieces: half of the time that the last piece took, at most `longest_start_gap`.
    Clock::duration start_gap_{};
    std::atomic<bool> has_free_pieces_{false};
    std::atomic<bool> has_failed_{false};
    std::atomic<int> active_count_{0}; // number of threads that copy a piece
};

} // namespace gdrkit::twin::verbs
