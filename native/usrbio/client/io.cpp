// The path of an operation: hf3fs_prep_io, hf3fs_submit_ios, hf3fs_wait_for_ios.
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
constexpr unsigned spins_least = 16;
constexpr unsigned spins_most = 2048;
// A ring whose spinning never helps tries it again now and then: the agent may have become faster.
constexpr unsigned try_again_every = 64;

inline void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

RingHandle* handle_of(const hf3fs_ior* ior) noexcept {
    return ior == nullptr ? nullptr : static_cast<RingHandle*>(ior->iorh);
}

bool before(const timespec& a, const timespec& b) noexcept {
    return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec < b.tv_nsec);
}

timespec later(timespec when, long nanoseconds) noexcept {
    when.tv_nsec += nanoseconds % second_ns;
    when.tv_sec += nanoseconds / second_ns + when.tv_nsec / second_ns;
    when.tv_nsec %= second_ns;
    return when;
}

long asked_sleep_ns() noexcept {
    static const long asked_ns = [] {
        const char* text = std::getenv("HF3FS_USRBIO_WAIT_JITTER_MS");
        const int milliseconds = text == nullptr ? 0 : std::atoi(text);
        return (milliseconds > 0 ? milliseconds : 0L) * 1000000L;
    }();
    return asked_ns;
}

// An agent that knows the extension wakes who says that it sleeps, so that only its death has to be noticed; of another
// one, 3FS waits so long for its semaphore. A timer that is due soon is dear: it is programmed into the processor.
long longest_sleep_ns(bool agent_aware) noexcept {
    return asked_sleep_ns() != 0 ? asked_sleep_ns() : agent_aware ? 20000000L : 1000000L;
}

// While another thread waits on the ring, this one waits for that: no longer than it was asked to wait at all.
bool lock_in_time(std::unique_lock<std::timed_mutex>& lock, std::uint32_t least, const timespec* deadline) {
    if (lock.try_lock()) {
        return true;
    }
    if (least == 0) {
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
    Wait(RingHandle& handle, hf3fs_cqe* cqes, std::uint32_t most, std::uint32_t least,
         const timespec* deadline) noexcept
        : handle_(handle), ring_(*handle.ring), cqes_(cqes), most_(most), least_(least), deadline_(deadline) {}

    int run() noexcept {
        take();
        if (filled_ < least_ && ring_.agent_aware() && !handle_.agent_gone()) {
            spin();
        }
        while (filled_ < least_) {
            // The ring says the end of its agent too, should the post for it be used up; or it is broken.
            if (ring_.agent_ended()) {
                handle_.gone.store(true, std::memory_order_relaxed);
            }
            if (handle_.agent_gone()) {
                return failed();
            }
            if (!sleep()) {
                break;
            }
            take();
        }
        ring_.slept(posts_);
        return static_cast<int>(filled_);
    }

private:
    void take() noexcept {
        const std::uint32_t count =
            ring_.reap(most_ - filled_, [this](auto index, auto result, auto user) { put(index, result, user); });
        // A daemon of 3FS may wait for room in the queue of completions.
        if (count != 0 && !ring_.agent_aware()) {
            handle_.submit_semaphore.post();
        }
    }

    void put(std::int32_t index, std::int64_t result, std::uint64_t userdata) noexcept {
        cqes_[filled_++] = {index, 0, result, reinterpret_cast<const void*>(userdata)};
    }

    void spin() noexcept {
        if (handle_.agent_was_asleep.load(std::memory_order_relaxed) ||
            (handle_.spins < spins_least && ++handle_.waits % try_again_every != 0)) {
            return;
        }
        const unsigned limit = handle_.spins < spins_least ? spins_least : handle_.spins;
        for (unsigned i = 0; i < limit; ++i) {
            if (ring_.has_completions()) {
                take();
                if (filled_ >= least_) {
                    handle_.spins = limit < spins_most / 2 ? limit * 2 : spins_most;
                    return;
                }
            }
            pause();
        }
        handle_.spins = limit / 2;
    }

    // false: the deadline has passed.
    bool sleep() noexcept {
        // Before the announcement: to have the agent watched takes its time, once.
        const bool is_timed =
            deadline_ != nullptr || !ring_.agent_aware() || asked_sleep_ns() != 0 || !handle_.is_watched();
        if (!ring_.prepare_to_sleep()) {
            return true;
        }
        if (is_timed) {
            return sleep_with_timer();
        }
        // Any timer costs each sleep some 200 ns, though it hardly ever expires.
        if (wait_until(ring_.completed(), nullptr)) {
            ++posts_;
        } else {
            ring_.woke();
        }
        return true;
    }

    // The clock is read only when nothing came in time: what was computed for an earlier wait serves the next ones,
    // until it is over.
    bool sleep_with_timer() noexcept {
        const bool deadline_first = deadline_ != nullptr && before(*deadline_, handle_.next_look);
        if (wait_until(ring_.completed(), deadline_first ? deadline_ : &handle_.next_look)) {
            ++posts_; // Who posted has taken the announcement back, if it was for one sleep.
            return true;
        }
        ring_.woke();
        timespec now{};
        clock_gettime(CLOCK_REALTIME, &now);
        if (!before(now, handle_.next_look)) {
            if (handle_.agent != nullptr) {
                handle_.agent->look_gone();
            }
            handle_.next_look = later(now, longest_sleep_ns(ring_.agent_aware()));
        }
        if (deadline_ != nullptr && !before(now, *deadline_)) {
            take(); // What came while this thread did not run.
            return false;
        }
        return true;
    }

    int failed() noexcept {
        take(); // What the agent completed before its end.
        ring_.fail_outstanding(most_ - filled_, -EREMOTEIO,
                               [this](auto index, auto result, auto user) { put(index, result, user); });
        return filled_ == 0 ? -EREMOTEIO : static_cast<int>(filled_);
    }

    RingHandle& handle_;
    ApplicationRing& ring_;
    hf3fs_cqe* cqes_;
    std::uint32_t most_;
    std::uint32_t least_;
    const timespec* deadline_;
    std::uint32_t filled_ = 0;
    std::uint32_t posts_ = 0; // That ended a sleep.
};

} // namespace

} // namespace gdrkit::usrbio

using namespace gdrkit::usrbio;

extern "C" {

int hf3fs_prep_io(const hf3fs_ior* ior, const hf3fs_iov* iov, bool read, void* ptr, int fd, size_t off, uint64_t len,
                  const void* userdata) {
    RingHandle* handle = handle_of(ior);
    if (handle == nullptr || iov == nullptr || read != ior->for_read || !inside(*iov, ptr, len) || fd == INT_MIN ||
        ((off | len | (off + len)) >> 63) != 0) [[unlikely]] {
        return -EINVAL;
    }
    FileTable::File file;
    if (!file_table().find(fd < 0 ? -fd : fd, file)) [[unlikely]] {
        return -EBADF;
    }
    const auto wanted = static_cast<std::uint32_t>(read ? FileAccess::read : FileAccess::write);
    if ((static_cast<std::uint32_t>(file.access) & wanted) == 0) [[unlikely]] {
        return -EACCES;
    }
    if (handle->agent_gone()) [[unlikely]] {
        return -EREMOTEIO;
    }
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(ptr) - reinterpret_cast<std::uintptr_t>(iov->base);
    return handle->ring->prepare(reinterpret_cast<const std::uint8_t(&)[16]>(iov->id), offset, file.inode, off, len,
                                 reinterpret_cast<std::uintptr_t>(userdata));
}

int hf3fs_submit_ios(const hf3fs_ior* ior) {
    RingHandle* handle = handle_of(ior);
    if (handle == nullptr) {
        return -EINVAL;
    }
    if (handle->agent_gone() || handle->ring->agent_ended()) [[unlikely]] {
        handle->gone.store(true, std::memory_order_relaxed);
        return -EREMOTEIO;
    }
    const bool asleep = handle->ring->submit();
    handle->agent_was_asleep.store(asleep, std::memory_order_relaxed);
    if (asleep) {
        handle->submit_semaphore.post();
    }
    return 0;
}

int hf3fs_wait_for_ios(const hf3fs_ior* ior, hf3fs_cqe* cqes, int cqec, int min_results, const timespec* abs_timeout) {
    RingHandle* handle = handle_of(ior);
    if (handle == nullptr || cqes == nullptr || cqec <= 0 ||
        (abs_timeout != nullptr && (abs_timeout->tv_nsec < 0 || abs_timeout->tv_nsec >= second_ns))) {
        return -EINVAL;
    }
    const auto most = static_cast<std::uint32_t>(cqec);
    const std::uint32_t least =
        min_results < 0 ? 0 : static_cast<std::uint32_t>(min_results < cqec ? min_results : cqec);
    if (handle->inherited.load(std::memory_order_relaxed)) [[unlikely]] {
        return -EREMOTEIO;
    }
    std::unique_lock lock(handle->reaping, std::defer_lock);
    if (!lock_in_time(lock, least, abs_timeout)) {
        return 0;
    }
    Wait wait(*handle, cqes, most, least, abs_timeout);
    return wait.run();
}

} // extern "C"
