// Operations on a glibc semaphore (sem_t) in memory that other processes can write.
//
// The functions of glibc are for processes that trust each other. A peer process can overwrite the field `private` of
// the semaphore (`sharing` below). If the kernel then refuses the wake-up, sem_post aborts the process. If the value is
// SEM_VALUE_MAX, sem_post fails without a wake-up. The functions here use the memory layout and the protocol of glibc,
// so that the other side may use glibc. They never read `sharing`, and return normally whatever a peer process writes.
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
    std::atomic<std::uint64_t> word; // Low half: the value. High half: the number of waiting threads.
    std::uint32_t sharing;           // 0 between threads of a process, semaphore_shared between processes.
    std::uint32_t reserved[5];
};
static_assert(sizeof(Semaphore) == sizeof(sem_t) && alignof(Semaphore) == alignof(sem_t));
static_assert(offsetof(Semaphore, word) == 0 && offsetof(Semaphore, sharing) == 8);
static_assert(sizeof(sem_t) == 32 && std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::endian::native == std::endian::little, "the value is the first four bytes");

// The value of `sharing` for a semaphore between processes: 128. glibc stores the inverse of the flag that it passes to
// the futex system call.
inline constexpr std::uint32_t semaphore_shared = FUTEX_PRIVATE_FLAG;
inline constexpr std::uint32_t semaphore_value_max = INT_MAX; // SEM_VALUE_MAX
// Add this to the word to count one more waiter.
inline constexpr std::uint64_t semaphore_one_waiter = std::uint64_t{1} << 32;

// Returns the address of the value, the half of the word on which waiters sleep in the kernel.
inline std::uint32_t* futex_of(Semaphore& semaphore) noexcept {
    return reinterpret_cast<std::uint32_t*>(&semaphore.word);
}

// Same as sem_init(semaphore, 1, 0).
inline void initialize(Semaphore& semaphore) noexcept {
    semaphore.sharing = semaphore_shared;
    semaphore.word.store(0, std::memory_order_release);
}

// Same as sem_post, but if the value is SEM_VALUE_MAX or more, this function does not change it, and still wakes a
// waiter.
inline void post(Semaphore& semaphore) noexcept {
    std::uint64_t old_word = semaphore.word.load(std::memory_order_relaxed);
    if (static_cast<std::uint32_t>(old_word) < semaphore_value_max) {
        // If a peer process meanwhile sets the value to UINT32_MAX, the addition carries into the number of waiters.
        // That harms only the semaphore of that peer.
        old_word = semaphore.word.fetch_add(1, std::memory_order_release);
    }
    if (old_word >= semaphore_one_waiter) {
        // This fails only if the address is no longer mapped. No thread waits then.
        syscall(SYS_futex, futex_of(semaphore), FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
}

// Same as sem_trywait: decrements the value; returns false if it is 0.
inline bool try_wait(Semaphore& semaphore) noexcept {
    std::uint64_t old_word = semaphore.word.load(std::memory_order_relaxed);
    while (static_cast<std::uint32_t>(old_word) != 0) {
        if (semaphore.word.compare_exchange_weak(old_word, old_word - 1, std::memory_order_acquire,
                                                 std::memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

// Same as sem_timedwait, with a deadline of CLOCK_REALTIME; with nullptr, same as sem_wait. Returns false if the
// deadline has passed or a signal was handled.
inline bool wait_until(Semaphore& semaphore, const timespec* deadline) noexcept {
    if (try_wait(semaphore)) {
        return true;
    }
    semaphore.word.fetch_add(semaphore_one_waiter, std::memory_order_relaxed);
    bool has_decremented = false;
    for (bool can_wait_again = true; can_wait_again && !has_decremented;) {
        const long status = syscall(SYS_futex, futex_of(semaphore), FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, 0,
                                    deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
        can_wait_again = status == 0 || errno == EAGAIN;
        has_decremented = try_wait(semaphore);
    }
    semaphore.word.fetch_sub(semaphore_one_waiter, std::memory_order_relaxed);
    return has_decremented;
}

} // namespace gdrkit::usrbio
