// The words of a glibc semaphore (sem_t) that lies in memory which other processes can write.
//
// glibc's own functions are for processes that trust each other: sem_post aborts the caller when `sharing` makes the
// kernel refuse the wake-up, and returns without one when the value is SEM_VALUE_MAX. These functions use the same
// words and the same protocol, so that the other side may be glibc. They read `sharing` never, and whatever a peer
// wrote, they return.
#pragma once

#include <linux/futex.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace gdrkit::usrbio {

// `struct new_sem` of glibc (sysdeps/nptl/internaltypes.h) with 64-bit atomics.
struct Semaphore {
    std::atomic<std::uint64_t> word; // Low half: the value. High half: how many threads wait.
    std::uint32_t sharing;           // For glibc: 0 between threads, 128 between processes.
    std::uint32_t reserved[5];
};
static_assert(sizeof(Semaphore) == sizeof(sem_t) && alignof(Semaphore) == alignof(sem_t));
static_assert(offsetof(Semaphore, word) == 0 && offsetof(Semaphore, sharing) == 8);
static_assert(sizeof(sem_t) == 32 && std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::endian::native == std::endian::little, "the value is the first four bytes");

inline constexpr std::uint32_t semaphore_shared = FUTEX_PRIVATE_FLAG;
inline constexpr std::uint32_t semaphore_value_max = INT_MAX; // SEM_VALUE_MAX
inline constexpr std::uint64_t semaphore_one_waiter = std::uint64_t{1} << 32;

// The word that waiters sleep on in the kernel.
inline std::uint32_t* futex_of(Semaphore& semaphore) noexcept {
    return reinterpret_cast<std::uint32_t*>(&semaphore.word);
}

// As sem_init(semaphore, 1, 0).
inline void initialize(Semaphore& semaphore) noexcept {
    semaphore.sharing = semaphore_shared;
    semaphore.word.store(0, std::memory_order_release);
}

// As sem_post. A value that is SEM_VALUE_MAX or more stays, and a waiter is woken all the same.
inline void post(Semaphore& semaphore) noexcept {
    std::uint64_t before = semaphore.word.load(std::memory_order_relaxed);
    if (static_cast<std::uint32_t>(before) < semaphore_value_max) {
        // Should a peer raise the value meanwhile, the carry changes the count of waiters of its own semaphore.
        before = semaphore.word.fetch_add(1, std::memory_order_release);
    }
    if (before >= semaphore_one_waiter) {
        // Fails only for an address that is not mapped any more: then nobody waits.
        syscall(SYS_futex, futex_of(semaphore), FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
}

// As sem_trywait: takes one from the value; false: it is 0.
inline bool try_wait(Semaphore& semaphore) noexcept {
    std::uint64_t before = semaphore.word.load(std::memory_order_relaxed);
    while (static_cast<std::uint32_t>(before) != 0) {
        if (semaphore.word.compare_exchange_weak(before, before - 1, std::memory_order_acquire,
                                                 std::memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

// As sem_timedwait, with a deadline on CLOCK_REALTIME; nullptr: as sem_wait. false: the deadline has passed, or a
// signal was handled.
inline bool wait_until(Semaphore& semaphore, const timespec* deadline) noexcept {
    if (try_wait(semaphore)) {
        return true;
    }
    semaphore.word.fetch_add(semaphore_one_waiter, std::memory_order_relaxed);
    bool taken = false;
    for (bool waits = true; waits && !taken;) {
        const long status = syscall(SYS_futex, futex_of(semaphore), FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, 0,
                                    deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
        waits = status == 0 || errno == EAGAIN;
        taken = try_wait(semaphore);
    }
    semaphore.word.fetch_sub(semaphore_one_waiter, std::memory_order_relaxed);
    return taken;
}

} // namespace gdrkit::usrbio
