// Announcements of sleep. A side of a ring announces that it sleeps. The other side checks for this announcement to
// decide whether it must post a semaphore.
//
// A side announces its sleep and then checks for work. The other side publishes work and then checks for an
// announcement. All four accesses are sequentially consistent, so the first side sees the work, or the other side sees
// the announcement.
#pragma once

#include "usrbio/ring/layout.hpp"

#include <algorithm>
#include <cstdint>

namespace gdrkit::usrbio {

// The announcements of one side. An announcement for one sleep moves a cache line between the processors four times:
// this side announces, the other side reads and withdraws the announcement, and this side reads the withdrawal. If a
// side nearly always sleeps until exactly one post, it announces its sleep permanently, and both processors keep the
// line in their caches. A post that comes while this side is awake causes a needless wake-up later. If there are many
// such posts, the side withdraws the permanent announcement.
class SleepAnnouncement {
public:
    explicit SleepAnnouncement(SideState& this_side) noexcept : this_side_(&this_side) {}

    // Records how this side got its latest work. `was_woken_by_one_post`: this side slept, and exactly one post woke
    // it.
    void record_sleep_outcome(bool was_woken_by_one_post) noexcept {
        score_ = was_woken_by_one_post ? std::min(score_ + 1, score_max) : score_ - std::min(score_, score_penalty);
        if (is_permanent_ && score_ < score_permanent_min) {
            is_permanent_ = false;
            this_side_->sleeping.store(awake, std::memory_order_seq_cst);
        }
    }

    // Announces the sleep. Call it before the last check for work.
    void announce() noexcept {
        is_permanent_ = is_permanent_ || score_ == score_max;
        if (!is_permanent_) {
            this_side_->sleeping.store(asleep_once, std::memory_order_seq_cst);
        } else if (this_side_->sleeping.load(std::memory_order_relaxed) != asleep_always) {
            // The permanent announcement is new, or the other side is of a version that resets every announcement.
            this_side_->sleeping.store(asleep_always, std::memory_order_seq_cst);
        }
    }

    // Withdraws an announcement for one sleep. Call it after the sleep, or if the last check found work.
    void withdraw() noexcept {
        if (!is_permanent_) {
            this_side_->sleeping.store(awake, std::memory_order_seq_cst);
        }
    }

private:
    // A sleep that exactly one post ended adds 1 to the score, and any other outcome subtracts 4. The announcement
    // becomes permanent after sixteen such sleeps in a row. It is withdrawn after three other outcomes in a row, or
    // if other outcomes are for some time more than a fifth of all outcomes.
    static constexpr std::uint32_t score_max = 16;
    static constexpr std::uint32_t score_permanent_min = 8;
    static constexpr std::uint32_t score_penalty = 4;

    SideState* this_side_;
    std::uint32_t score_ = 0; // From 0 to score_max.
    bool is_permanent_ = false;
};

// Returns true if the caller must post the semaphore of the other side, and then withdraws that side's announcement for
// one sleep. Call it after work was published. `count_available()` returns the number of completions that the other
// side can take; it is called only if that side sleeps.
template <typename CountAvailable> bool must_wake(SideState& other_side, CountAvailable count_available) noexcept {
    const std::uint32_t sleeping = other_side.sleeping.load(std::memory_order_seq_cst);
    if (sleeping == awake || count_available() < other_side.awaited_count.load(std::memory_order_seq_cst)) {
        return false;
    }
    if (sleeping == asleep_once) {
        // No atomic exchange is needed: if this store overwrites a later announcement, the post of the caller ends that
        // sleep.
        other_side.sleeping.store(awake, std::memory_order_relaxed);
    }
    return true;
}

} // namespace gdrkit::usrbio
