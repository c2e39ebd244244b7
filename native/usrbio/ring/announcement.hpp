// Announcements of sleep: a side of a ring announces that it sleeps, and the other side checks whether it must wake it.
//
// A side announces its sleep and then checks for work. The other side publishes work and then checks for an
// announcement. All four accesses are sequentially consistent, so at least one side sees the other.
#pragma once

#include "usrbio/ring/layout.hpp"

#include <algorithm>
#include <cstdint>

namespace gdrkit::usrbio {

// The announcement of a side's own sleep. An announcement for one sleep moves its cache line between the processors
// four times: it is written, read, withdrawn, and found withdrawn. A side that nearly always sleeps until exactly one
// post announces its sleep permanently, and both processors keep the line. It withdraws the permanent announcement when
// posts come that it does not wait for, because each of them causes a needless wake-up later.
class SleepAnnouncement {
public:
    explicit SleepAnnouncement(SideState& own) noexcept : own_(&own) {}

    // Records the end of a round, in which work arrived. `one_post_awaited`: this side slept until exactly one post.
    void record_round(bool one_post_awaited) noexcept {
        score_ = one_post_awaited ? std::min(score_ + 1, score_max) : score_ - std::min(score_, penalty);
        if (is_permanent_ && score_ < score_permanent_min) {
            is_permanent_ = false;
            own_->sleeping.store(awake, std::memory_order_seq_cst);
        }
    }

    // Call it before the last check for work.
    void announce() noexcept {
        is_permanent_ = is_permanent_ || score_ == score_max;
        if (!is_permanent_) {
            own_->sleeping.store(asleep_once, std::memory_order_seq_cst);
        } else if (own_->sleeping.load(std::memory_order_relaxed) != asleep_always) {
            // This is the first time, or the other side is of a version that resets every announcement.
            own_->sleeping.store(asleep_always, std::memory_order_seq_cst);
        }
    }

    // Call it after the sleep, or instead of it.
    void withdraw() noexcept {
        if (!is_permanent_) {
            own_->sleeping.store(awake, std::memory_order_seq_cst);
        }
    }

private:
    // A round with one awaited post adds 1, every other round subtracts 4. The announcement becomes permanent after
    // sixteen good rounds in a row. It is withdrawn after three bad rounds, or if more than one round in five is bad.
    static constexpr std::uint32_t score_max = 16;
    static constexpr std::uint32_t score_permanent_min = 8;
    static constexpr std::uint32_t penalty = 4;

    SideState* own_;
    std::uint32_t score_ = 0;
    bool is_permanent_ = false;
};

// Call it after work was published. Returns whether the other side must be woken by its semaphore.
inline bool must_wake(SideState& other) noexcept {
    const std::uint32_t sleeping = other.sleeping.load(std::memory_order_seq_cst);
    if (sleeping == asleep_once) {
        // No atomic exchange is needed: if this store overwrites a later announcement, the following post ends that
        // sleep.
        other.sleeping.store(awake, std::memory_order_relaxed);
    }
    return sleeping != awake;
}

} // namespace gdrkit::usrbio
