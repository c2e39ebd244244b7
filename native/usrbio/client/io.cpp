// The functions on the path of an operation: hf3fs_prep_io, hf3fs_submit_ios, hf3fs_wait_for_ios.
#include "usrbio/client/file_table.hpp"
#include "usrbio/client/range.hpp"
#include "usrbio/client/ring_handle.hpp"

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdlib>

static_assert(sizeof(hf3fs_cqe) == 24 && offsetof(hf3fs_cqe, index) == 0 && offsetof(hf3fs_cqe, reserved) == 4 &&
              offsetof(hf3fs_cqe, result) == 8 && offsetof(hf3fs_cqe, userdata) == 16);

namespace gdrkit::usrbio {

namespace {

constexpr long second_ns = 1000000000;
constexpr unsigned spins_min = 16;
constexpr unsigned spins_max = 2048;
// If spinning never helped on a ring, it is tried again after so many waits, because the agent may have become faster.
constexpr unsigned retry_interval = 64;

inline void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

RingHandle* ring_handle(const hf3fs_ior* ior) noexcept {
    return ior == nullptr ? nullptr : static_cast<RingHandle*>(ior->iorh);
}

bool before(const timespec& a, const timespec& b) noexcept {
    return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec < b.tv_nsec);
}

timespec add_nanoseconds(timespec time, long nanoseconds) noexcept {
    time.tv_nsec += nanoseconds % second_ns;
    time.tv_sec += nanoseconds / second_ns + time.tv_nsec / second_ns;
    time.tv_nsec %= second_ns;
    return time;
}

long configured_sleep_ns() noexcept {
    static const long configured_ns = [] {
        const char* text = std::getenv("HF3FS_USRBIO_WAIT_JITTER_MS");
        const int milliseconds = text == nullptr ? 0 : std::atoi(text);
        return (milliseconds > 0 ? milliseconds : 0L) * 1000000L;
    }();
    return configured_ns;
}

// With an agent that supports the extension, a timer only serves to notice the agent's death, because that agent wakes
// sleepers. With another agent, the timeout is that of 3FS. A short timer is expensive, because it must be programmed
// into the processor.
long sleep_max_ns(bool agent_has_extension) noexcept {
    return configured_sleep_ns() != 0 ? configured_sleep_ns() : agent_has_extension ? 20000000L : 1000000L;
}

// Waits while another thread waits on the ring, at most until the deadline of this wait.
bool lock_until(std::unique_lock<std::timed_mutex>& lock, std::uint32_t count_min, const timespec* deadline) {
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

class Wait {
public:
    Wait(RingHandle& handle, hf3fs_cqe* cqes, std::uint32_t count_max, std::uint32_t count_min,
         const timespec* deadline) noexcept
        : handle_(handle), ring_(*handle.ring), cqes_(cqes), count_max_(count_max), count_min_(count_min),
          deadline_(deadline) {}

    int run() noexcept {
        reap();
        if (count_ < count_min_ && ring_.agent_has_extension() && !handle_.agent_closed()) {
            spin();
        }
        while (count_ < count_min_) {
            // The ring also records that its agent has ended, in case the post for that was consumed. Or the ring is
            // broken.
            if (ring_.agent_ended()) {
                handle_.closed.store(true, std::memory_order_relaxed);
            }
            if (handle_.agent_closed()) {
                return fail_outstanding();
            }
            if (!sleep()) {
                break;
            }
            reap();
        }
        ring_.record_wait(posts_);
        return static_cast<int>(count_);
    }

private:
    void reap() noexcept {
        const std::uint32_t count = ring_.reap(
            count_max_ - count_, [this](auto index, auto result, auto user) { append(index, result, user); });
        // A daemon of 3FS may wait for space in the completion queue.
        if (count != 0 && !ring_.agent_has_extension()) {
            handle_.submit_semaphore.post();
        }
    }

    void append(std::int32_t index, std::int64_t result, std::uint64_t userdata) noexcept {
        cqes_[count_++] = {index, 0, result, reinterpret_cast<const void*>(userdata)};
    }

    void spin() noexcept {
        if (handle_.agent_was_asleep.load(std::memory_order_relaxed) ||
            (handle_.spin_limit < spins_min && ++handle_.wait_count % retry_interval != 0)) {
            return;
        }
        const unsigned limit = handle_.spin_limit < spins_min ? spins_min : handle_.spin_limit;
        for (unsigned i = 0; i < limit; ++i) {
            if (ring_.has_completions()) {
                reap();
                if (count_ >= count_min_) {
                    handle_.spin_limit = limit < spins_max / 2 ? limit * 2 : spins_max;
                    return;
                }
            }
            pause();
        }
        handle_.spin_limit = limit / 2;
    }

    // Returns false if the deadline has passed.
    bool sleep() noexcept {
        // Call is_watched() before the announcement, because the first call takes long.
        const bool is_timed =
            deadline_ != nullptr || !ring_.agent_has_extension() || configured_sleep_ns() != 0 || !handle_.is_watched();
        if (!ring_.prepare_to_sleep()) {
            return true;
        }
        if (is_timed) {
            return sleep_with_timer();
        }
        // A timer costs each sleep about 200 ns, although it rarely expires.
        if (wait_until(ring_.completion_semaphore(), nullptr)) {
            ++posts_;
        } else {
            ring_.end_sleep();
        }
        return true;
    }

    // Sleeps with a timer. The clock is only read if no post came in time: the time of the next check, computed for an
    // earlier wait, serves later waits until it has passed.
    bool sleep_with_timer() noexcept {
        const bool deadline_first = deadline_ != nullptr && before(*deadline_, handle_.next_agent_check);
        if (wait_until(ring_.completion_semaphore(), deadline_first ? deadline_ : &handle_.next_agent_check)) {
            ++posts_; // The side that posted has withdrawn the announcement, if it was for one sleep.
            return true;
        }
        ring_.end_sleep();
        timespec now{};
        clock_gettime(CLOCK_REALTIME, &now);
        if (!before(now, handle_.next_agent_check)) {
            if (handle_.agent != nullptr) {
                handle_.agent->poll_peer_closed();
            }
            handle_.next_agent_check = add_nanoseconds(now, sleep_max_ns(ring_.agent_has_extension()));
        }
        if (deadline_ != nullptr && !before(now, *deadline_)) {
            reap(); // Completions may have come while this thread did not run.
            return false;
        }
        return true;
    }

    int fail_outstanding() noexcept {
        reap(); // Return what the agent completed before its end.
        ring_.fail_outstanding(count_max_ - count_, -EREMOTEIO,
                               [this](auto index, auto result, auto user) { append(index, result, user); });
        return count_ == 0 ? -EREMOTEIO : static_cast<int>(count_);
    }

    RingHandle& handle_;
    ApplicationRing& ring_;
    hf3fs_cqe* cqes_;
    std::uint32_t count_max_;
    std::uint32_t count_min_;
    const timespec* deadline_;
    std::uint32_t count_ = 0;
    std::uint32_t posts_ = 0; // Number of posts that ended a sleep.
};

} // namespace

} // namespace gdrkit::usrbio

using namespace gdrkit::usrbio;

extern "C" {

int hf3fs_prep_io(const hf3fs_ior* ior, const hf3fs_iov* iov, bool read, void* ptr, int fd, size_t off, uint64_t len,
                  const void* userdata) {
    RingHandle* handle = ring_handle(ior);
    if (handle == nullptr || iov == nullptr || read != ior->for_read || !is_inside(*iov, ptr, len) || fd == INT_MIN ||
        ((off | len | (off + len)) >> 63) != 0) [[unlikely]] {
        return -EINVAL;
    }
    FileTable::File file;
    if (!file_table().find(fd < 0 ? -fd : fd, file)) [[unlikely]] {
        return -EBADF;
    }
    const auto required_access = static_cast<std::uint32_t>(read ? FileAccess::read : FileAccess::write);
    if ((static_cast<std::uint32_t>(file.access) & required_access) == 0) [[unlikely]] {
        return -EACCES;
    }
    if (handle->agent_closed()) [[unlikely]] {
        return -EREMOTEIO;
    }
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(ptr) - reinterpret_cast<std::uintptr_t>(iov->base);
    return handle->ring->prepare(reinterpret_cast<const std::uint8_t(&)[16]>(iov->id), offset, file.inode, off, len,
                                 reinterpret_cast<std::uintptr_t>(userdata));
}

int hf3fs_submit_ios(const hf3fs_ior* ior) {
    RingHandle* handle = ring_handle(ior);
    if (handle == nullptr) {
        return -EINVAL;
    }
    if (handle->agent_closed() || handle->ring->agent_ended()) [[unlikely]] {
        handle->closed.store(true, std::memory_order_relaxed);
        return -EREMOTEIO;
    }
    const bool agent_sleeps = handle->ring->submit();
    handle->agent_was_asleep.store(agent_sleeps, std::memory_order_relaxed);
    if (agent_sleeps) {
        handle->submit_semaphore.post();
    }
    return 0;
}

int hf3fs_wait_for_ios(const hf3fs_ior* ior, hf3fs_cqe* cqes, int cqec, int min_results, const timespec* abs_timeout) {
    RingHandle* handle = ring_handle(ior);
    if (handle == nullptr || cqes == nullptr || cqec <= 0 ||
        (abs_timeout != nullptr && (abs_timeout->tv_nsec < 0 || abs_timeout->tv_nsec >= second_ns))) {
        return -EINVAL;
    }
    const auto count_max = static_cast<std::uint32_t>(cqec);
    const std::uint32_t count_min =
        min_results < 0 ? 0 : static_cast<std::uint32_t>(min_results < cqec ? min_results : cqec);
    if (handle->inherited.load(std::memory_order_relaxed)) [[unlikely]] {
        return -EREMOTEIO;
    }
    std::unique_lock lock(handle->reap_mutex, std::defer_lock);
    if (!lock_until(lock, count_min, abs_timeout)) {
        return 0;
    }
    Wait wait(*handle, cqes, count_max, count_min, abs_timeout);
    return wait.run();
}

} // extern "C"
