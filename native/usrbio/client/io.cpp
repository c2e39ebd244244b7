// The C functions that an application calls for each operation or batch: hf3fs_prep_io, hf3fs_submit_ios,
// hf3fs_wait_for_ios.
#include "common/spin.hpp"
#include "usrbio/client/file_table.hpp"
#include "usrbio/client/gpu_visibility.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/ring_handle.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdlib>

static_assert(sizeof(hf3fs_cqe) == 24 && offsetof(hf3fs_cqe, index) == 0 && offsetof(hf3fs_cqe, reserved) == 4 &&
              offsetof(hf3fs_cqe, result) == 8 && offsetof(hf3fs_cqe, userdata) == 16);

namespace gdrkit::usrbio {

namespace {

constexpr long ns_per_second = 1000000000;
// A wait (one call of hf3fs_wait_for_ios) spins for at least this minimum, or not at all. Spinning is worth it if it
// saves a sleep and its wake-up, which take 10 to 25 us on a virtual machine.
constexpr long spin_ns_min = 2000;
constexpr long spin_ns_max = 150000;
// If spinning did not help on a ring, its waits stop spinning. Every 64th wait (waits_per_spin_retry) spins again,
// because the agent may have become faster. That wait spins for spin_retry_ns, in which the agent can execute a batch
// of reads.
constexpr unsigned waits_per_spin_retry = 64;
constexpr long spin_retry_ns = 50000;
constexpr unsigned spins_per_clock_read = 16;
// After this number of spins, the wait calls sched_yield(), because the agent may need this processor. The wait yields
// seldom: if the thread of the agent only waits for work, it returns the processor at once, and the yield was useless.
constexpr unsigned spins_per_yield = 64;

// Returns true if `length` is not 0, and all `length` bytes from `memory` on are in the iov and in a single block of
// the iov. All values come from the application and may be invalid.
bool is_inside(const hf3fs_iov& iov, const void* memory, std::uint64_t length) noexcept {
    // Compare offsets, because a sum of address and length could overflow.
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(memory) - reinterpret_cast<std::uintptr_t>(iov.base);
    return iov.base != nullptr && length != 0 && offset < iov.size && length <= iov.size - offset &&
           (iov.block_size == 0 || length <= iov.block_size - offset % iov.block_size);
}

RingHandle* get_ring_handle(const hf3fs_ior* ior) noexcept {
    return ior == nullptr ? nullptr : static_cast<RingHandle*>(ior->iorh);
}

bool is_before(const timespec& left, const timespec& right) noexcept {
    return left.tv_sec < right.tv_sec || (left.tv_sec == right.tv_sec && left.tv_nsec < right.tv_nsec);
}

long read_monotonic_ns() noexcept {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * ns_per_second + now.tv_nsec;
}

timespec add_nanoseconds(timespec time, long nanoseconds) noexcept {
    time.tv_nsec += nanoseconds % ns_per_second;
    time.tv_sec += nanoseconds / ns_per_second + time.tv_nsec / ns_per_second;
    time.tv_nsec %= ns_per_second;
    return time;
}

// Returns the longest sleep that the environment variable HF3FS_USRBIO_WAIT_JITTER_MS sets, or 0 if the variable sets
// none.
long get_configured_sleep_max_ns() noexcept {
    static const long configured_ns = [] {
        const char* setting_text = std::getenv("HF3FS_USRBIO_WAIT_JITTER_MS");
        const int milliseconds = setting_text == nullptr ? 0 : std::atoi(setting_text);
        return (milliseconds > 0 ? milliseconds : 0L) * 1000000L;
    }();
    return configured_ns;
}

// Returns the longest sleep before a wait checks the ring and the agent again. An agent that supports gdrkit's
// extension of the ring (ring/layout.hpp) wakes sleepers reliably. So the check is only needed to notice the agent's
// death, and 20 ms suffice. Without the extension, the sleep is as short as in the client library of 3FS (1 ms). Short
// sleeps are expensive, because the kernel must program the timer of the processor for each sleep.
long get_sleep_max_ns(bool agent_has_extension) noexcept {
    return get_configured_sleep_max_ns() != 0 ? get_configured_sleep_max_ns()
           : agent_has_extension              ? 20000000L
                                              : 1000000L;
}

// Locks the mutex of a ring for reaping completions. If another thread reaps, waits until the deadline, but does not
// wait if `count_min` is 0. Returns false if the mutex was not locked.
bool lock_for_reaping(std::unique_lock<std::timed_mutex>& lock, std::uint32_t count_min, const timespec* deadline) {
    if (lock.try_lock()) {
        return true;
    }
    if (count_min == 0) {
        return false;
    }
    if (deadline == nullptr) {
        lock.lock();
        return true;
    }
    const auto since_epoch = std::chrono::seconds(deadline->tv_sec) + std::chrono::nanoseconds(deadline->tv_nsec);
    return lock.try_lock_until(std::chrono::system_clock::time_point(since_epoch));
}

// One call of hf3fs_wait_for_ios: reaps completions, spins, and sleeps until it has `count_min` completions or the
// deadline has passed.
class Wait {
public:
    Wait(RingHandle& handle, hf3fs_cqe* cqes, std::uint32_t count_max, std::uint32_t count_min,
         const timespec* deadline) noexcept
        : handle_(handle), ring_(*handle.ring), cqes_(cqes), count_max_(count_max), count_min_(count_min),
          deadline_(deadline) {}

    // Returns the number of completions. Returns -EREMOTEIO if the agent has ended and no operation is left.
    int run() noexcept {
        reap();
        if (reaped_count_ < count_min_ && ring_.agent_has_extension() && !handle_.has_agent_ended()) {
            spin();
        }
        while (reaped_count_ < count_min_) {
            // An agent that ends records its end in the ring, and posts the completion semaphore. An earlier wait may
            // have consumed the post, so check the record in the ring. ring_.has_agent_ended() is also true if the ring
            // contains invalid values.
            if (ring_.has_agent_ended()) {
                handle_.is_unserved.store(true, std::memory_order_relaxed);
            }
            if (handle_.has_agent_ended()) {
                return fail_outstanding();
            }
            if (!sleep()) {
                break;
            }
            reap();
        }
        ring_.record_wait(post_count_);
        return static_cast<int>(reaped_count_);
    }

private:
    void reap() noexcept {
        const std::uint32_t count =
            ring_.reap(count_max_ - reaped_count_,
                       [this](auto index, auto result, auto userdata) { append(index, result, userdata); });
        // The reap has freed space in the completion queue. A daemon of 3FS may wait for this space on the submit
        // semaphore, so post it.
        if (count != 0 && !ring_.agent_has_extension()) {
            handle_.submit_semaphore.post();
        }
    }

    void append(std::int32_t index, std::int64_t result, std::uint64_t userdata) noexcept {
        if (is_log_enabled(LogLevel::debug)) [[unlikely]] {
            log_line(LogLevel::debug, "ring %p: entry %d completed: %lld", static_cast<void*>(&handle_), index,
                     static_cast<long long>(result));
        }
        cqes_[reaped_count_++] = {index, 0, result, reinterpret_cast<const void*>(userdata)};
    }

    // Checks for completions until there are enough, or until the ring's spin limit has passed. Adapts the limit to the
    // outcome.
    void spin() noexcept {
        if (handle_.agent_was_asleep.load(std::memory_order_relaxed) ||
            (handle_.spin_limit_ns < spin_ns_min && ++handle_.unspun_wait_count % waits_per_spin_retry != 0)) {
            return;
        }
        const long limit_ns = handle_.spin_limit_ns < spin_ns_min ? spin_retry_ns : handle_.spin_limit_ns;
        long end_ns = 0; // 0: not known, because a short wait need not read the clock.
        for (unsigned spin_count = 1;; ++spin_count) {
            if (ring_.has_completions()) {
                reap();
                if (reaped_count_ >= count_min_) {
                    handle_.spin_limit_ns = std::min(limit_ns * 2, spin_ns_max);
                    return;
                }
            }
            if (spin_count % spins_per_clock_read == 0) {
                const long now_ns = read_monotonic_ns();
                end_ns = end_ns == 0 ? now_ns + limit_ns : end_ns;
                if (now_ns >= end_ns) {
                    handle_.spin_limit_ns = limit_ns / 2;
                    return;
                }
            }
            if (spin_count % spins_per_yield == 0) {
                sched_yield();
            }
            pause_processor();
        }
    }

    // Returns false if the deadline has passed.
    bool sleep() noexcept {
        // Call start_watching_agent() before prepare_to_sleep(), which announces the sleep in the ring, because the
        // first call of start_watching_agent() takes long.
        const bool needs_timer = deadline_ != nullptr || !ring_.agent_has_extension() ||
                                 get_configured_sleep_max_ns() != 0 || !handle_.start_watching_agent();
        if (!ring_.prepare_to_sleep(count_min_ - reaped_count_)) { // A completion is available.
            return true;
        }
        if (needs_timer) {
            return sleep_with_timer();
        }
        // Sleep without a timer. A timer would cost about 200 ns for each sleep.
        if (wait_until(ring_.completion_semaphore(), nullptr)) {
            ++post_count_;
        } else {
            ring_.end_sleep();
        }
        return true;
    }

    // Sleeps until a post, the deadline or the next check of the agent. Returns false if the deadline has passed. The
    // time of the next check is computed only after the previous check, so most sleeps need not read the clock.
    bool sleep_with_timer() noexcept {
        const bool is_deadline_first = deadline_ != nullptr && is_before(*deadline_, handle_.next_agent_check);
        if (wait_until(ring_.completion_semaphore(), is_deadline_first ? deadline_ : &handle_.next_agent_check)) {
            ++post_count_; // No end_sleep(): an agent that posts also withdraws an announcement for one sleep.
            return true;
        }
        ring_.end_sleep();
        timespec now{};
        clock_gettime(CLOCK_REALTIME, &now);
        if (!is_before(now, handle_.next_agent_check)) {
            if (handle_.agent != nullptr) {
                handle_.agent->check_closed_by_agent();
            }
            handle_.next_agent_check = add_nanoseconds(now, get_sleep_max_ns(ring_.agent_has_extension()));
        }
        if (deadline_ != nullptr && !is_before(now, *deadline_)) {
            reap(); // Completions may have come before this thread ran again.
            return false;
        }
        return true;
    }

    // Appends to `cqes_` the completions that the agent has written, and then the operations in flight with the result
    // -EREMOTEIO. Returns the number of all completions of this wait, or -EREMOTEIO if there are none.
    int fail_outstanding() noexcept {
        reap(); // Return the operations that the agent completed before its end.
        ring_.fail_outstanding(count_max_ - reaped_count_, -EREMOTEIO,
                               [this](auto index, auto result, auto userdata) { append(index, result, userdata); });
        return reaped_count_ == 0 ? -EREMOTEIO : static_cast<int>(reaped_count_);
    }

    RingHandle& handle_;
    ApplicationRing& ring_;
    hf3fs_cqe* cqes_;
    std::uint32_t count_max_;  // Largest number of completions to return; `cqes_` has space for them.
    std::uint32_t count_min_;  // Number of completions to wait for.
    const timespec* deadline_; // CLOCK_REALTIME; null: no deadline.
    std::uint32_t reaped_count_ = 0;
    std::uint32_t post_count_ = 0; // Number of posts that ended a sleep.
};

// Makes the data of completed reads visible to the work of the GPUs. If that fails, changes the results of the
// successful reads to -EIO.
void make_reads_visible(hf3fs_cqe* cqes, int count) noexcept {
    if (flush_all_contexts() != 0) {
        for (hf3fs_cqe* cqe = cqes; cqe != cqes + count; ++cqe) {
            cqe->result = cqe->result < 0 ? cqe->result : -EIO;
        }
    }
}

int prepare_io(const hf3fs_ior* ior, const hf3fs_iov* iov, bool read, void* ptr, int fd, size_t off, uint64_t len,
               const void* userdata) noexcept {
    RingHandle* handle = get_ring_handle(ior);
    // The file offset, the length and their sum must be below 2^63.
    if (handle == nullptr || iov == nullptr || read != ior->for_read || !is_inside(*iov, ptr, len) || fd == INT_MIN ||
        ((off | len | (off + len)) >> 63) != 0) [[unlikely]] {
        return -EINVAL;
    }
    FileTable::File file;
    // A negative `fd` is a value that hf3fs_reg_fd returned: the negated number of the library's duplicate.
    if (!file_table().find(fd < 0 ? -fd : fd, file)) [[unlikely]] {
        return -EBADF;
    }
    const auto required_access = static_cast<std::uint32_t>(read ? FileAccess::read : FileAccess::write);
    if ((static_cast<std::uint32_t>(file.access) & required_access) == 0) [[unlikely]] {
        return -EACCES;
    }
    if (handle->has_agent_ended()) [[unlikely]] {
        return -EREMOTEIO;
    }
    const std::uint64_t iov_offset =
        reinterpret_cast<std::uintptr_t>(ptr) - reinterpret_cast<std::uintptr_t>(iov->base);
    return handle->ring->prepare(reinterpret_cast<const std::uint8_t(&)[16]>(iov->id), iov_offset, file.inode, off, len,
                                 reinterpret_cast<std::uintptr_t>(userdata));
}

} // namespace

} // namespace gdrkit::usrbio

using namespace gdrkit::usrbio;

extern "C" {

int hf3fs_prep_io(const hf3fs_ior* ior, const hf3fs_iov* iov, bool read, void* ptr, int fd, size_t off, uint64_t len,
                  const void* userdata) {
    const int result = prepare_io(ior, iov, read, ptr, fd, off, len, userdata);
    if (is_log_enabled(LogLevel::debug)) [[unlikely]] {
        log_line(LogLevel::debug, "ring %p: %s %llu bytes at offset %zu of descriptor %d, memory %p: %s %d",
                 ior == nullptr ? nullptr : ior->iorh, read ? "read" : "write", static_cast<unsigned long long>(len),
                 off, fd, ptr, result < 0 ? "refused with" : "entry", result);
    }
    return result;
}

int hf3fs_submit_ios(const hf3fs_ior* ior) {
    RingHandle* handle = get_ring_handle(ior);
    if (handle == nullptr) {
        return -EINVAL;
    }
    if (handle->has_agent_ended() || handle->ring->has_agent_ended()) [[unlikely]] {
        handle->is_unserved.store(true, std::memory_order_relaxed);
        return -EREMOTEIO;
    }
    const bool must_wake_agent = handle->ring->submit();
    handle->agent_was_asleep.store(must_wake_agent, std::memory_order_relaxed);
    if (must_wake_agent) {
        handle->submit_semaphore.post();
    }
    if (is_log_enabled(LogLevel::debug)) [[unlikely]] {
        log_line(LogLevel::debug, "ring %p: submitted; the agent %s", static_cast<void*>(handle),
                 must_wake_agent ? "slept and was woken" : "is awake");
    }
    return 0;
}

int hf3fs_wait_for_ios(const hf3fs_ior* ior, hf3fs_cqe* cqes, int cqec, int min_results, const timespec* abs_timeout) {
    RingHandle* handle = get_ring_handle(ior);
    if (handle == nullptr || cqes == nullptr || cqec <= 0 ||
        (abs_timeout != nullptr && (abs_timeout->tv_nsec < 0 || abs_timeout->tv_nsec >= ns_per_second))) {
        return -EINVAL;
    }
    const auto count_max = static_cast<std::uint32_t>(cqec);
    const std::uint32_t count_min =
        min_results < 0 ? 0 : static_cast<std::uint32_t>(min_results < cqec ? min_results : cqec);
    if (handle->is_inherited.load(std::memory_order_relaxed)) [[unlikely]] {
        return -EREMOTEIO;
    }
    std::unique_lock lock(handle->reap_mutex, std::defer_lock);
    if (!lock_for_reaping(lock, count_min, abs_timeout)) {
        return 0;
    }
    Wait wait(*handle, cqes, count_max, count_min, abs_timeout);
    const int count = wait.run();
    if (ior->for_read && count > 0 && has_context_to_flush()) [[unlikely]] {
        make_reads_visible(cqes, count);
    }
    return count;
}

} // extern "C"
