#include "usrbio/ring/agent_side.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace gdrkit::usrbio {

namespace {

// Copies once: the compiler may not go back to the shared memory for a field that was checked already.
template <typename T> T copied(const T& shared) noexcept {
    T copy = shared;
    asm volatile("" : "+m"(copy) : : "memory");
    return copy;
}

} // namespace

AgentRing::AgentRing(const RingView& view, std::int32_t io_depth, std::int64_t timeout_ns)
    : view_(view), announcement_(view.extension->agent), io_depth_(io_depth), timeout_ns_(timeout_ns),
      positions_(view.slots) {}

int AgentRing::attach(void* memory, std::size_t bytes, std::int32_t io_depth, std::int64_t timeout_ns,
                      std::unique_ptr<AgentRing>& ring) noexcept {
    RingView view;
    if (const int status = RingView::over(memory, bytes, view); status != 0) {
        return status;
    }
    const std::int64_t depth = io_depth < 0 ? -std::int64_t{io_depth} : std::int64_t{io_depth};
    if (depth >= std::int64_t{view.slots} || timeout_ns < 0) {
        return -EINVAL;
    }
    const std::int32_t submission = view.indices->submission_tail.load(std::memory_order_acquire);
    const std::int32_t completion = view.indices->completion_head.load(std::memory_order_acquire);
    const std::int32_t reaped = view.indices->completion_tail.load(std::memory_order_acquire);
    if (!view.holds(submission) || !view.holds(completion) || !view.holds(reaped)) {
        return -EINVAL;
    }
    try {
        ring.reset(new AgentRing(view, io_depth, timeout_ns));
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
    ring->claimed_ = ring->seen_head_ = ring->submission_tail_ = static_cast<std::uint32_t>(submission);
    ring->completion_head_ = static_cast<std::uint32_t>(completion);
    ring->completion_tail_ = static_cast<std::uint32_t>(reaped);
    // The agent makes the semaphore, as the daemon of 3FS does: whatever the memory held, it begins at 0.
    initialize(*view.completed);
    SideState& agent = view.extension->agent;
    agent.sleeping.store(sleeps_not, std::memory_order_relaxed);
    agent.ended.store(0, std::memory_order_relaxed);
    agent.magic.store(extension_magic, std::memory_order_release);
    return 0;
}

AgentRing::~AgentRing() {
    end();
}

void AgentRing::end() noexcept {
    view_.extension->agent.ended.store(1, std::memory_order_seq_cst);
    post(*view_.completed);
}

void AgentRing::fail() noexcept {
    if (!broken_) {
        broken_ = true;
        end();
    }
}

std::size_t AgentRing::ripen(std::uint32_t available, std::int64_t now_ns) noexcept {
    if (io_depth_ > 0) {
        const auto depth = static_cast<std::uint32_t>(io_depth_);
        ripe_ += (available - ripe_) / depth * depth;
    } else if (io_depth_ == 0) {
        ripe_ = available;
    } else if (ripe_ == 0) {
        const auto depth = static_cast<std::uint32_t>(-io_depth_);
        const bool waits = available != 0 && available < depth && timeout_ns_ > 0;
        if (waits && held_until_ns_ < 0) {
            held_until_ns_ = now_ns + timeout_ns_;
        }
        if (!waits || now_ns >= held_until_ns_) {
            ripe_ = std::min(available, depth);
            held_until_ns_ = -1;
        }
    }
    return ripe_;
}

std::uint32_t AgentRing::room() noexcept {
    const std::int32_t tail = view_.indices->completion_tail.load(std::memory_order_acquire);
    if (!view_.holds(tail)) {
        fail();
        return 0;
    }
    // Reaping only makes room: a tail that went backwards, or past the head, reads as less of it.
    const std::uint32_t before = view_.distance(completion_tail_, completion_head_);
    const std::uint32_t used = view_.distance(static_cast<std::uint32_t>(tail), completion_head_);
    if (used > before) {
        fail();
        return 0;
    }
    completion_tail_ = static_cast<std::uint32_t>(tail);
    return view_.slots - 1 - used - outstanding_;
}

std::size_t AgentRing::claim(std::span<ClaimedOperation> out, std::int64_t now_ns) noexcept {
    if (broken_) {
        return 0;
    }
    const std::int32_t head = view_.indices->submission_head.load(std::memory_order_acquire);
    if (!view_.holds(head)) {
        fail();
        return 0;
    }
    const std::uint32_t available = view_.distance(claimed_, static_cast<std::uint32_t>(head));
    // A head that went backwards points into what was claimed already.
    if (available + view_.distance(submission_tail_, claimed_) >= view_.slots || available < ripe_) {
        fail();
        return 0;
    }
    if (seen_head_ != static_cast<std::uint32_t>(head)) {
        seen_head_ = static_cast<std::uint32_t>(head);
        announcement_.settle(std::exchange(slept_for_work_, false));
    }
    std::size_t count = std::min(ripen(available, now_ns), out.size());
    nothing_due_ = ripe_ == 0;
    room_short_ = false;
    if (count == 0) {
        return 0;
    }
    const std::size_t free = room();
    room_short_ = free < count;
    count = std::min(count, free);
    for (std::size_t i = 0; i < count; ++i) {
        const Submission submission = copied(view_.submissions[claimed_]);
        if (!view_.holds(submission.index)) {
            fail();
            return i;
        }
        out[i].arguments = copied(view_.arguments[submission.index]);
        out[i].position = claimed_;
        positions_[claimed_] = {submission.userdata, submission.index, 1};
        claimed_ = view_.next(claimed_);
        --ripe_;
        ++outstanding_;
    }
    return count;
}

bool AgentRing::complete(std::uint32_t position, std::int64_t result) noexcept {
    if (position >= view_.slots || positions_[position].state != 1) {
        return false;
    }
    // claim() left room for this one.
    view_.completions[completion_head_] = {positions_[position].index, 0, result, positions_[position].userdata};
    completion_head_ = view_.next(completion_head_);
    positions_[position].state = 2;
    --outstanding_;
    ++unpublished_;
    return true;
}

void AgentRing::flush() noexcept {
    if (unpublished_ == 0) {
        return;
    }
    while (submission_tail_ != claimed_ && positions_[submission_tail_].state == 2) {
        positions_[submission_tail_].state = 0;
        submission_tail_ = view_.next(submission_tail_);
    }
    // First the tail: who has seen the completion finds room for its next submission.
    view_.indices->submission_tail.store(static_cast<std::int32_t>(submission_tail_), std::memory_order_release);
    view_.indices->completion_head.store(static_cast<std::int32_t>(completion_head_), std::memory_order_seq_cst);
    if (view_.extension->application.magic.load(std::memory_order_relaxed) != extension_magic) {
        for (; unpublished_ != 0; --unpublished_) {
            post(*view_.completed);
        }
    } else if (must_wake(view_.extension->application)) {
        post(*view_.completed);
    }
    unpublished_ = 0;
}

bool AgentRing::prepare_to_sleep() noexcept {
    if (broken_) {
        return false;
    }
    announcement_.announce();
    const std::int32_t head = view_.indices->submission_head.load(std::memory_order_seq_cst);
    // What waits for room in the completion queue waits for the application, which posts after it reaped.
    const bool idle = static_cast<std::uint32_t>(head) == seen_head_ && (nothing_due_ || room_short_);
    if (!idle) {
        announcement_.take_back();
    }
    return idle;
}

} // namespace gdrkit::usrbio
