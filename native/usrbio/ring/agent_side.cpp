#include "usrbio/ring/agent_side.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace gdrkit::usrbio {

namespace {

// Copies a value once: the compiler must not read the shared memory again for a field that was checked already.
template <typename T> T copy_once(const T& shared) noexcept {
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
    if (const int status = RingView::bind(memory, bytes, view); status != 0) {
        return status;
    }
    const std::int64_t depth = io_depth < 0 ? -std::int64_t{io_depth} : std::int64_t{io_depth};
    if (depth >= std::int64_t{view.slots} || timeout_ns < 0) {
        return -EINVAL;
    }
    const std::int32_t submission = view.indices->submission_tail.load(std::memory_order_acquire);
    const std::int32_t completion = view.indices->completion_head.load(std::memory_order_acquire);
    const std::int32_t reaped = view.indices->completion_tail.load(std::memory_order_acquire);
    if (!view.is_valid(submission) || !view.is_valid(completion) || !view.is_valid(reaped)) {
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
    // The agent initializes the semaphore to 0, as the daemon of 3FS does.
    initialize(*view.completion_semaphore);
    SideState& agent = view.extension->agent;
    agent.sleeping.store(awake, std::memory_order_relaxed);
    agent.ended.store(0, std::memory_order_relaxed);
    agent.magic.store(extension_magic, std::memory_order_release);
    return 0;
}

AgentRing::~AgentRing() {
    announce_end();
}

void AgentRing::announce_end() noexcept {
    view_.extension->agent.ended.store(1, std::memory_order_seq_cst);
    post(*view_.completion_semaphore);
}

void AgentRing::mark_broken() noexcept {
    if (!broken_) {
        broken_ = true;
        announce_end();
    }
}

std::size_t AgentRing::update_due(std::uint32_t available, std::int64_t now_ns) noexcept {
    if (io_depth_ > 0) {
        const auto depth = static_cast<std::uint32_t>(io_depth_);
        due_ += (available - due_) / depth * depth;
    } else if (io_depth_ == 0) {
        due_ = available;
    } else if (due_ == 0) {
        const auto depth = static_cast<std::uint32_t>(-io_depth_);
        const bool is_incomplete = available != 0 && available < depth && timeout_ns_ > 0;
        if (is_incomplete && held_until_ns_ < 0) {
            held_until_ns_ = now_ns + timeout_ns_;
        }
        if (!is_incomplete || now_ns >= held_until_ns_) {
            due_ = std::min(available, depth);
            held_until_ns_ = -1;
        }
    }
    return due_;
}

std::uint32_t AgentRing::completion_space() noexcept {
    const std::int32_t tail = view_.indices->completion_tail.load(std::memory_order_acquire);
    if (!view_.is_valid(tail)) {
        mark_broken();
        return 0;
    }
    // Reaping only adds space. If the tail went backwards, or past the head, there is less space than before.
    const std::uint32_t before = view_.distance(completion_tail_, completion_head_);
    const std::uint32_t used = view_.distance(static_cast<std::uint32_t>(tail), completion_head_);
    if (used > before) {
        mark_broken();
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
    if (!view_.is_valid(head)) {
        mark_broken();
        return 0;
    }
    const std::uint32_t available = view_.distance(claimed_, static_cast<std::uint32_t>(head));
    // If the head went backwards, it points to submissions that were claimed already.
    if (available + view_.distance(submission_tail_, claimed_) >= view_.slots || available < due_) {
        mark_broken();
        return 0;
    }
    if (seen_head_ != static_cast<std::uint32_t>(head)) {
        seen_head_ = static_cast<std::uint32_t>(head);
        announcement_.record_round(std::exchange(slept_for_work_, false));
    }
    std::size_t count = std::min(update_due(available, now_ns), out.size());
    nothing_due_ = due_ == 0;
    lacks_completion_space_ = false;
    if (count == 0) {
        return 0;
    }
    const std::size_t free = completion_space();
    lacks_completion_space_ = free < count;
    count = std::min(count, free);
    for (std::size_t i = 0; i < count; ++i) {
        const Submission submission = copy_once(view_.submissions[claimed_]);
        if (!view_.is_valid(submission.index)) {
            mark_broken();
            return i;
        }
        out[i].arguments = copy_once(view_.arguments[submission.index]);
        out[i].position = claimed_;
        positions_[claimed_] = {submission.userdata, submission.index, 1};
        claimed_ = view_.next(claimed_);
        --due_;
        ++outstanding_;
    }
    return count;
}

bool AgentRing::complete(std::uint32_t position, std::int64_t result) noexcept {
    if (position >= view_.slots || positions_[position].state != 1) {
        return false;
    }
    // claim() has reserved space for this completion.
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
    // The tail must come first: an application that has seen the completion has space for its next submission.
    view_.indices->submission_tail.store(static_cast<std::int32_t>(submission_tail_), std::memory_order_release);
    view_.indices->completion_head.store(static_cast<std::int32_t>(completion_head_), std::memory_order_seq_cst);
    if (view_.extension->application.magic.load(std::memory_order_relaxed) != extension_magic) {
        for (; unpublished_ != 0; --unpublished_) {
            post(*view_.completion_semaphore);
        }
    } else if (must_wake(view_.extension->application)) {
        post(*view_.completion_semaphore);
    }
    unpublished_ = 0;
}

bool AgentRing::prepare_to_sleep() noexcept {
    if (broken_) {
        return false;
    }
    announcement_.announce();
    const std::int32_t head = view_.indices->submission_head.load(std::memory_order_seq_cst);
    // Submissions that wait for space in the completion queue need no check: the application posts after it reaped.
    const bool idle = static_cast<std::uint32_t>(head) == seen_head_ && (nothing_due_ || lacks_completion_space_);
    if (!idle) {
        announcement_.withdraw();
    }
    return idle;
}

} // namespace gdrkit::usrbio
