// How a side of a ring says that it sleeps, and how the other one knows that it must wake it.
//
// Who wants to sleep says so and then looks for work; who has work publishes it and then looks at what the other said:
// all four are sequentially consistent, so one of the two sees the other.
#pragma once

#include "usrbio/ring/layout.hpp"

#include <algorithm>
#include <cstdint>

namespace gdrkit::usrbio {

// What a side says of its own sleep. The word for one sleep goes from processor to processor four times: it is said,
// seen, taken back, and seen to be gone. A side that nearly always sleeps until the one post that it waits for says it
// once and for all, and both processors keep the line. It takes that back when posts come that it does not wait for:
// each of them is a vain wake-up later.
class Announcement {
public:
    explicit Announcement(SideState& own) noexcept : own_(&own) {}

    // A round ended: work came, and the post that says so was, or would have been, the one that this side slept for.
    void settle(bool one_post_awaited) noexcept {
        trust_ = one_post_awaited ? std::min(trust_ + 1, trust_most) : trust_ - std::min(trust_, distrust);
        if (stays_ && trust_ < trust_least) {
            stays_ = false;
            own_->sleeping.store(sleeps_not, std::memory_order_seq_cst);
        }
    }

    // Before the last look for work.
    void announce() noexcept {
        stays_ = stays_ || trust_ == trust_most;
        if (!stays_) {
            own_->sleeping.store(sleeps_once, std::memory_order_seq_cst);
        } else if (own_->sleeping.load(std::memory_order_relaxed) != sleeps_always) {
            // For the first time, or the other side is of a version that takes back whatever it sees.
            own_->sleeping.store(sleeps_always, std::memory_order_seq_cst);
        }
    }

    // After the sleep, or instead of it.
    void take_back() noexcept {
        if (!stays_) {
            own_->sleeping.store(sleeps_not, std::memory_order_seq_cst);
        }
    }

private:
    // Each round for it counts one, each against it four: it is said after sixteen in a row, and taken back after three
    // against it, or where more than one in five is.
    static constexpr std::uint32_t trust_most = 16;
    static constexpr std::uint32_t trust_least = 8;
    static constexpr std::uint32_t distrust = 4;

    SideState* own_;
    std::uint32_t trust_ = 0;
    bool stays_ = false;
};

// After the work was published: whether the other side must be woken by its semaphore.
inline bool must_wake(SideState& other) noexcept {
    const std::uint32_t sleeping = other.sleeping.load(std::memory_order_seq_cst);
    if (sleeping == sleeps_once) {
        // No exchange: should it overwrite a later announcement, then the post that follows wakes that sleep.
        other.sleeping.store(sleeps_not, std::memory_order_relaxed);
    }
    return sleeping != sleeps_not;
}

} // namespace gdrkit::usrbio
