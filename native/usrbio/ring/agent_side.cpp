// The agent's side of a ring. Every value that the application wrote is copied once. The indices are checked here, and
// the arguments of operations by the caller of claim().
#include "usrbio/ring/agent_side.hpp"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

namespace gdrkit::usrbio {

namespace {

// Copies a value from shared memory once. Without the barrier the compiler may read the memory again after the caller
// has checked the copy. The application may have changed the value by then.
template <typename T> T copy_once(const T& shared) noexcept {
    T copy = shared;
    asm volatile("" : "+m"(copy) : : "memory");
    return copy;
}

} // namespace

AgentRing::AgentRing(const RingView& view, std::int32_t io_depth, std::int64_t timeout_ns)
    : view_(view), sleep_announcement_(view.extension->agent), io_depth_(io_depth), timeout_ns_(timeout_ns),
      claimed_submissions_(view.slot_count) {}

int AgentRing::attach(void* memory, std::size_t bytes, std::int32_t io_depth, std::int64_t timeout_ns,
                      std::unique_ptr<AgentRing>& ring) noexcept {
    RingView view;
    if (const int status = RingView::bind(memory, bytes, view); status != 0) {
        return status;
    }
    const std::int64_t batch_size = io_depth < 0 ? -std::int64_t{io_depth} : std::int64_t{io_depth};
    if (batch_size >= std::int64_t{view.slot_count} || timeout_ns < 0) {
        return -EINVAL;
    }
    const std::int32_t submission_tail = view.indices->submission_tail.load(std::memory_order_acquire);
    const std::int32_t completion_head = view.indices->completion_head.load(std::memory_order_acquire);
    const std::int32_t completion_tail = view.indices->completion_tail.load(std::memory_order_acquire);
    if (!view.is_valid(submission_tail) || !view.is_valid(completion_head) || !view.is_valid(completion_tail)) {
        return -EINVAL;
    }
    try {
        ring.reset(new AgentRing(view, io_depth, timeout_ns));
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
    ring->next_to_claim_ = ring->last_seen_head_ = ring->submission_tail_ = static_cast<std::uint32_t>(submission_tail);
    ring->completion_head_ = static_cast<std::uint32_t>(completion_head);
    ring->completion_tail_ = static_cast<std::uint32_t>(completion_tail);
    // The agent initializes the semaphore to 0, as the daemon of 3FS does.
    initialize(*view.completion_semaphore);
    SideState& agent_state = view.extension->agent;
    agent_state.sleeping.store(awake, std::memory_order_relaxed);
    agent_state.ended.store(0, std::memory_order_relaxed);
    agent_state.magic.store(extension_magic, std::memory_order_release);
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
    if (!is_broken_) {
        is_broken_ = true;
        announce_end();
    }
}

// Updates due_count_, the number of submissions that the agent may claim now, by the rules of io_depth (see attach() in
// agent_side.hpp), and returns it. `available`: the number of submissions that the application has published and the
// agent has not claimed.
std::size_t AgentRing::update_due_count(std::uint32_t available, std::int64_t now_ns) noexcept {
    if (io_depth_ > 0) {
        const auto batch_size = static_cast<std::uint32_t>(io_depth_);
        due_count_ += (available - due_count_) / batch_size * batch_size;
    } else if (io_depth_ == 0) {
        due_count_ = available;
    } else if (due_count_ == 0) {
        const auto batch_size = static_cast<std::uint32_t>(-io_depth_);
        const bool is_incomplete = available != 0 && available < batch_size && timeout_ns_ > 0;
        if (is_incomplete && held_until_ns_ < 0) {
            held_until_ns_ = now_ns + timeout_ns_;
        }
        if (!is_incomplete || now_ns >= held_until_ns_) {
            due_count_ = std::min(available, batch_size);
            held_until_ns_ = -1;
        }
    }
    return due_count_;
}

std::uint32_t AgentRing::count_free_completions() noexcept {
    const std::int32_t tail = view_.indices->completion_tail.load(std::memory_order_acquire);
    if (!view_.is_valid(tail)) {
        mark_broken();
        return 0;
    }
    // Reaping only adds space. If the tail went backwards, or past the head, there is less space than before.
    const std::uint32_t used_before = view_.distance(completion_tail_, completion_head_);
    const std::uint32_t used_now = view_.distance(static_cast<std::uint32_t>(tail), completion_head_);
    if (used_now > used_before) {
        mark_broken();
        return 0;
    }
    completion_tail_ = static_cast<std::uint32_t>(tail);
    return view_.slot_count - 1 - used_now - outstanding_count_;
}

std::size_t AgentRing::claim(std::span<ClaimedOperation> claimed, std::int64_t now_ns) noexcept {
    if (is_broken_) {
        return 0;
    }
    const std::int32_t head = view_.indices->submission_head.load(std::memory_order_acquire);
    if (!view_.is_valid(head)) {
        mark_broken();
        return 0;
    }
    const std::uint32_t available = view_.distance(next_to_claim_, static_cast<std::uint32_t>(head));
    // Detect a head that moved back among the claimed submissions (first term: `available` wrapped around, so the
    // claimed and the available submissions do not fit into the ring) or before a submission that was already due
    // (second term). Any other step back looks like a change of the number of new submissions.
    if (available + view_.distance(submission_tail_, next_to_claim_) >= view_.slot_count || available < due_count_) {
        mark_broken();
        return 0;
    }
    if (last_seen_head_ != static_cast<std::uint32_t>(head)) {
        last_seen_head_ = static_cast<std::uint32_t>(head);
        // From these outcomes, the announcement learns whether to stay permanent, see announcement.hpp. end_sleep()
        // sets found_work_after_sleep_.
        sleep_announcement_.record_sleep_outcome(std::exchange(found_work_after_sleep_, false));
    }
    std::size_t count = std::min(update_due_count(available, now_ns), claimed.size());
    last_claim_found_nothing_due_ = due_count_ == 0;
    last_claim_lacked_completion_space_ = false;
    if (count == 0) {
        return 0;
    }
    const std::size_t free_count = count_free_completions();
    last_claim_lacked_completion_space_ = free_count < count;
    count = std::min(count, free_count);
    for (std::size_t i = 0; i < count; ++i) {
        const Submission submission = copy_once(view_.submissions[next_to_claim_]);
        if (!view_.is_valid(submission.index)) {
            mark_broken();
            return i;
        }
        claimed[i].arguments = copy_once(view_.arguments[submission.index]);
        claimed[i].position = next_to_claim_;
        claimed_submissions_[next_to_claim_] = {submission.userdata, submission.index, SubmissionState::claimed};
        next_to_claim_ = view_.next(next_to_claim_);
        --due_count_;
        ++outstanding_count_;
    }
    return count;
}

bool AgentRing::complete(std::uint32_t position, std::int64_t result) noexcept {
    if (position >= view_.slot_count || claimed_submissions_[position].state != SubmissionState::claimed) {
        return false;
    }
    // claim() has reserved space in the completion queue for each claimed operation.
    view_.completions[completion_head_] = {claimed_submissions_[position].index, 0, result,
                                           claimed_submissions_[position].userdata};
    completion_head_ = view_.next(completion_head_);
    claimed_submissions_[position].state = SubmissionState::completed;
    --outstanding_count_;
    ++unpublished_count_;
    return true;
}

void AgentRing::flush() noexcept {
    if (unpublished_count_ == 0) {
        return;
    }
    while (submission_tail_ != next_to_claim_ &&
           claimed_submissions_[submission_tail_].state == SubmissionState::completed) {
        claimed_submissions_[submission_tail_].state = SubmissionState::free;
        submission_tail_ = view_.next(submission_tail_);
    }
    // Store the tail first: an application that sees a completion must also see the free space for its next submission.
    view_.indices->submission_tail.store(static_cast<std::int32_t>(submission_tail_), std::memory_order_release);
    view_.indices->completion_head.store(static_cast<std::int32_t>(completion_head_), std::memory_order_seq_cst);
    // The client library of 3FS does not set the magic number. It expects one post for each completion.
    if (view_.extension->application.magic.load(std::memory_order_relaxed) != extension_magic) {
        for (; unpublished_count_ != 0; --unpublished_count_) {
            post(*view_.completion_semaphore);
        }
    } else if (must_wake(view_.extension->application, [this] { return count_unreaped_completions(); })) {
        post(*view_.completion_semaphore);
    }
    unpublished_count_ = 0;
}

// Returns the number of published completions that the application has not taken. If the application has written an
// invalid index, returns the largest number, so that the application is woken.
std::uint32_t AgentRing::count_unreaped_completions() const noexcept {
    const std::int32_t tail = view_.indices->completion_tail.load(std::memory_order_acquire);
    return view_.is_valid(tail) ? view_.distance(static_cast<std::uint32_t>(tail), completion_head_)
                                : std::numeric_limits<std::uint32_t>::max();
}

bool AgentRing::prepare_to_sleep() noexcept {
    if (is_broken_) {
        return false;
    }
    sleep_announcement_.announce();
    const std::int32_t head = view_.indices->submission_head.load(std::memory_order_seq_cst);
    // Submissions that wait for space in the completion queue do not keep the agent awake: the client library of 3FS
    // posts the submit semaphore when it has reaped completions. With gdrkit's client library, the completion queue
    // always has space, because the library reuses an entry of the ring only after it has reaped its completion.
    const bool is_idle = static_cast<std::uint32_t>(head) == last_seen_head_ &&
                         (last_claim_found_nothing_due_ || last_claim_lacked_completion_space_);
    if (!is_idle) {
        sleep_announcement_.withdraw();
    }
    return is_idle;
}

} // namespace gdrkit::usrbio
