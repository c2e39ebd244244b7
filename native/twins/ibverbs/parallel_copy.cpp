// Copies memory between this process and a peer process. Idle threads help with large copies.

#include "ibverbs/parallel_copy.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "ibverbs/link.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A smaller copy is not divided into pieces, because it would end before another thread notices it.
constexpr std::size_t min_parallel_bytes = 256U << 10;
constexpr std::size_t piece_bytes = 128U << 10;
// Size of the end of a message, which is copied after all pieces.
constexpr std::size_t tail_bytes = 64;

// A yield or the copy of a piece takes longer than these times only if other threads use the processor. The scheduler
// could then stop a helping thread in the middle of a piece, and the whole copy would wait for it. So a thread that was
// delayed in this way does not help for `help_pause`.
constexpr std::chrono::microseconds longest_yield{50}, longest_piece{200};
constexpr std::chrono::milliseconds help_pause{20};
thread_local std::chrono::steady_clock::time_point no_help_before{};
// A yield that takes longer than `whole_time_slice` gave the processor to a thread that used its whole time slice,
// perhaps to spin for a lock that this thread holds while it polls (UCX polls with the lock of its worker). This thread
// yields only inside polls, so the lock is always held during a yield, and the spinning thread never gets it. Therefore
// this thread does not yield for `yield_pause`. Then the scheduler stops it at any point, also between two polls, when
// the lock is free.
constexpr std::chrono::microseconds whole_time_slice{1000};
constexpr std::chrono::milliseconds yield_pause{5};
thread_local std::chrono::steady_clock::time_point no_yield_before{};
// No thread waits longer than this before it begins a piece.
constexpr std::chrono::microseconds longest_start_gap{10};

PeerCopy make_copy_part(const PeerCopy& copy, std::size_t offset, std::size_t size_bytes) {
    return {copy.process_id, copy.is_read, copy.local_address + offset, copy.remote_address + offset, size_bytes};
}

// Copy between this process and another one with one system call. Return the number of copied bytes, which may be fewer
// than requested, or -1 with errno. The raw system calls bypass the libc functions that ThreadSanitizer intercepts,
// because it would report these copies as data races (see bounce_buffer.cpp).
long copy_ranges_once(int process_id, bool is_read, std::span<const iovec> local_ranges,
                      std::span<const iovec> remote_ranges) {
    return syscall(is_read ? SYS_process_vm_readv : SYS_process_vm_writev, process_id, local_ranges.data(),
                   local_ranges.size(), remote_ranges.data(), remote_ranges.size(), 0);
}

} // namespace

bool copy_with_peer(const PeerCopy& copy) {
    iovec local_range{copy.local_address, copy.size_bytes};
    iovec remote_range{reinterpret_cast<void*>(copy.remote_address), copy.size_bytes};
    while (local_range.iov_len > 0) {
        const long moved_bytes = copy_ranges_once(copy.process_id, copy.is_read, {&local_range, 1}, {&remote_range, 1});
        if (moved_bytes <= 0) {
            return false;
        }
        for (iovec* const range : {&local_range, &remote_range}) {
            range->iov_base = static_cast<char*>(range->iov_base) + moved_bytes;
            range->iov_len -= static_cast<std::size_t>(moved_bytes);
        }
    }
    return true;
}

bool copy_lists_with_peer(int process_id, bool is_read, std::span<const iovec> local_ranges,
                          std::span<const iovec> remote_ranges) {
    std::size_t size_bytes = 0;
    for (const iovec& range : local_ranges) {
        size_bytes += range.iov_len;
    }
    return copy_ranges_once(process_id, is_read, local_ranges, remote_ranges) == static_cast<long>(size_bytes);
}

bool ParallelCopy::run(const PeerCopy& copy) {
    if (copy.size_bytes < min_parallel_bytes) {
        return copy_with_peer(copy);
    }
    const std::size_t tail_offset = copy.size_bytes - tail_bytes;
    {
        std::lock_guard lock(mutex_);
        copy_ = copy;
        begin_offset_ = 0;
        end_offset_ = tail_offset;
        has_failed_ = false;
        has_free_pieces_ = true;
    }
    while (copy_next_piece(/*from_end=*/false)) {
    }
    // Spin before sleeping: a helper ends its last piece soon, and waking this thread would take longer.
    spin_until([this] { return active_count_ == 0; });
    for (int running_count = active_count_; running_count != 0; running_count = active_count_) {
        active_count_.wait(running_count);
    }
    return !has_failed_ && copy_with_peer(make_copy_part(copy, tail_offset, tail_bytes));
}

void ParallelCopy::help() {
    for (auto now = Clock::now(); has_free_pieces_ && now >= no_help_before && copy_next_piece(/*from_end=*/true);) {
        const auto began_at = std::exchange(now, Clock::now());
        if (now - began_at > longest_piece) {
            no_help_before = now + help_pause;
        }
    }
}

void ParallelCopy::yield_processor() {
    const auto began_at = Clock::now();
    if (began_at < no_yield_before) {
        return;
    }
    sched_yield();
    const auto now = Clock::now();
    if (now - began_at > longest_yield) {
        no_help_before = now + help_pause;
    }
    if (now - began_at > whole_time_slice) {
        no_yield_before = now + yield_pause;
    }
}

bool ParallelCopy::copy_next_piece(bool from_end) {
    PeerCopy piece{};
    Clock::time_point may_begin_at;
    {
        std::lock_guard lock(mutex_);
        const std::size_t size_bytes = std::min(piece_bytes, end_offset_ - begin_offset_);
        if (size_bytes == 0) {
            return false;
        }
        piece = make_copy_part(copy_, from_end ? end_offset_ - size_bytes : begin_offset_, size_bytes);
        (from_end ? end_offset_ : begin_offset_) += from_end ? -size_bytes : size_bytes;
        has_free_pieces_ = begin_offset_ != end_offset_;
        ++active_count_;
        may_begin_at = std::max(Clock::now(), next_begin_at_);
        next_begin_at_ = may_begin_at + start_gap_;
    }
    // Wait until the other thread is halfway through its piece.
    while (Clock::now() < may_begin_at) {
    }
    const bool has_copied = copy_with_peer(piece);
    {
        std::lock_guard lock(mutex_);
        start_gap_ = std::min<Clock::duration>((Clock::now() - may_begin_at) / 2, longest_start_gap);
        if (!has_copied) {
            has_failed_ = true;
            end_offset_ = begin_offset_; // the pieces that remain are not copied
            has_free_pieces_ = false;
        }
    }
    --active_count_;
    active_count_.notify_one();
    return true;
}

} // namespace gdrkit::twin::verbs
