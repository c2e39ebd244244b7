// The parts of the application's side of a ring that are not inline: attaching, and reading the submission tail
// that the agent wrote.
#include "usrbio/ring/application_side.hpp"

#include <new>

namespace gdrkit::usrbio {

ApplicationRing::ApplicationRing(const RingView& view)
    : view_(view), is_index_in_use_(std::make_unique<std::atomic<std::uint8_t>[]>(view.slot_count)),
      sleep_announcement_(view.extension->application) {}

int ApplicationRing::attach(void* memory, std::size_t bytes, std::unique_ptr<ApplicationRing>& ring) noexcept {
    RingView view;
    if (const int status = RingView::bind(memory, bytes, view); status != 0) {
        return status;
    }
    const std::int32_t submission_head = view.indices->submission_head.load(std::memory_order_acquire);
    const std::int32_t submission_tail = view.indices->submission_tail.load(std::memory_order_acquire);
    const std::int32_t completion_head = view.indices->completion_head.load(std::memory_order_acquire);
    const std::int32_t completion_tail = view.indices->completion_tail.load(std::memory_order_acquire);
    if (!view.is_valid(submission_head) || !view.is_valid(submission_tail) || !view.is_valid(completion_head) ||
        !view.is_valid(completion_tail)) {
        return -EINVAL;
    }
    try {
        ring.reset(new ApplicationRing(view));
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
    ring->submission_head_ = ring->published_submission_head_ = static_cast<std::uint32_t>(submission_head);
    ring->submission_tail_ = static_cast<std::uint32_t>(submission_tail);
    ring->completion_tail_ = static_cast<std::uint32_t>(completion_tail);
    SideState& application_state = view.extension->application;
    application_state.sleeping.store(awake, std::memory_order_relaxed);
    application_state.ended.store(0, std::memory_order_relaxed);
    application_state.processor.store(0, std::memory_order_relaxed);
    application_state.magic.store(extension_magic, std::memory_order_release);
    return 0;
}

bool ApplicationRing::has_queue_space(std::uint32_t next_head) noexcept {
    // Completions may come out of order. An index can therefore be free while the next position in the submission queue
    // is not.
    const std::int32_t submission_tail = view_.indices->submission_tail.load(std::memory_order_acquire);
    if (!view_.is_valid(submission_tail)) {
        is_broken_.store(true, std::memory_order_release);
        post(*view_.completion_semaphore); // The thread that reaps may sleep, and a faulty agent may never wake it.
        return false;
    }
    submission_tail_ = static_cast<std::uint32_t>(submission_tail);
    return next_head != submission_tail_;
}

} // namespace gdrkit::usrbio
