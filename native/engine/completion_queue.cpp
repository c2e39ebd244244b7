// The list of entries of a completion queue, the eventfd that reports them, and the end of a job.
#include "engine/completion_queue.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/futex.hpp"
#include "engine/failure.hpp"

namespace gdrkit::engine {

CompletionQueue::CompletionQueue(bool has_event) {
    if (has_event) {
        event_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (!event_) {
            throw make_kernel_error("eventfd", errno);
        }
    }
}

void CompletionQueue::push(std::unique_ptr<Entry> entry) noexcept {
    Entry* const new_entry = entry.release();
    new_entry->next = newest_entry_.load(std::memory_order_relaxed);
    // `was_empty` is computed before the exchange, because afterwards the reader may free the entry.
    bool was_empty = new_entry->next == nullptr;
    while (!newest_entry_.compare_exchange_weak(new_entry->next, new_entry, std::memory_order_release,
                                                std::memory_order_relaxed)) {
        was_empty = new_entry->next == nullptr;
    }
    // Only the push of the first entry writes to the eventfd, so that a batch of entries costs one system call. The
    // counter of the eventfd cannot overflow, because take() resets it.
    if (was_empty && event_) {
        eventfd_write(event_.get(), 1);
    }
}

std::vector<std::uint64_t> CompletionQueue::take() {
    // The event is cleared before the entries are taken, so that an entry that is added meanwhile sets it again.
    if (eventfd_t count = 0; event_) {
        eventfd_read(event_.get(), &count);
    }
    return take_entries();
}

std::vector<std::uint64_t> CompletionQueue::take_entries() {
    std::vector<std::uint64_t> tokens;
    if (newest_entry_.load(std::memory_order_relaxed) == nullptr) {
        return tokens;
    }
    for (Entry* entry = newest_entry_.exchange(nullptr, std::memory_order_acquire); entry != nullptr;) {
        const std::unique_ptr<Entry> owned_entry(entry);
        tokens.push_back(owned_entry->token);
        entry = owned_entry->next;
    }
    std::reverse(tokens.begin(), tokens.end());
    return tokens;
}

bool Completion::wait(std::chrono::nanoseconds timeout) noexcept {
    // A wait for 0 ns would still sleep in the kernel, by default for 50 us.
    if (timeout <= std::chrono::nanoseconds::zero()) {
        return is_over();
    }
    return wait_for_word(state_, timeout, [&](std::uint32_t state) {
        if (state == running) {
            // The word is no longer `running`, so wait_for_word() does not sleep now, but calls this lambda again.
            state_.compare_exchange_strong(state, awaited);
        }
        return state == over;
    });
}

void Completion::notify(std::shared_ptr<CompletionQueue> queue, std::uint64_t token) {
    auto entry = std::make_unique<CompletionQueue::Entry>(CompletionQueue::Entry{.token = token, .next = nullptr});
    const std::lock_guard lock(mutex_);
    if (is_over()) {
        queue->push(std::move(entry));
    } else {
        notifications_.push_back({std::move(queue), std::move(entry)});
    }
}

void Completion::end() noexcept {
    const std::lock_guard lock(mutex_);
    if (state_.exchange(over, std::memory_order_acq_rel) == awaited) {
        futex_wake_all(state_);
    }
    for (Notification& notification : notifications_) {
        notification.queue->push(std::move(notification.entry));
    }
    notifications_.clear();
}

} // namespace gdrkit::engine
