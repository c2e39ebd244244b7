// Functions for a thread that sleeps until another thread changes a 32-bit word and wakes it (futex(2)). They replace
// std::condition_variable, whose destructor waits for all waiters: in a forked child, it would wait for ever for a
// thread that only the parent has.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace gdrkit {

// A timeout of a hundred years, for calls that should wait without limit.
inline constexpr std::chrono::nanoseconds no_limit = std::chrono::hours(24 * 36500);

// If the word has the value `expected`, sleeps until futex_wake_all(), at most `timeout`. May return earlier.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::chrono::nanoseconds timeout) noexcept {
    static_assert(sizeof word == sizeof(std::uint32_t) && std::atomic<std::uint32_t>::is_always_lock_free);
    const auto seconds = std::chrono::floor<std::chrono::seconds>(timeout);
    const timespec time{.tv_sec = static_cast<time_t>(seconds.count()),
                        .tv_nsec = static_cast<long>((timeout - seconds).count())};
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, &time, nullptr, 0);
}

// Wakes all threads that sleep in futex_wait() for this word.
inline void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until `is_met` returns true for the value of the word, at most `timeout`. Returns whether `is_met` returned
// true.
template <typename Condition>
bool wait_for_word(std::atomic<std::uint32_t>& word, std::chrono::nanoseconds timeout, const Condition& is_met) {
    const auto deadline = std::chrono::steady_clock::now() + std::min(timeout, no_limit);
    for (;;) {
        const std::uint32_t value = word.load();
        if (is_met(value)) {
            return true;
        }
        const auto remaining = deadline - std::chrono::steady_clock::now();
        if (remaining <= std::chrono::nanoseconds::zero()) {
            return false;
        }
        futex_wait(word, value, remaining);
    }
}

} // namespace gdrkit
