// The list of entries of a completion queue, and the eventfd that reports them.
#include "engine/completion_queue.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "engine/failure.hpp"

namespace gdrkit::engine {

CompletionQueue::CompletionQueue(bool has_event) {
    if (has_event) {
        event_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (!event_) {
            throw kernel_error("eventfd", errno);
        }
    }
}

void CompletionQueue::push(std::unique_ptr<Entry> entry) noexcept {
    Entry* const added = entry.release();
    added->next = newest_.load(std::memory_order_relaxed);
    // After the exchange, the reader may have freed the entry.
    bool was_empty = added->next == nullptr;
    while (!newest_.compare_exchange_weak(added->next, added, std::memory_order_release, std::memory_order_relaxed)) {
        was_empty = added->next == nullptr;
    }
    // Only the first entry writes, so that a batch of entries costs one system call. The counter cannot overflow.
    if (was_empty && event_) {
        eventfd_write(event_.get(), 1);
    }
}

std::vector<std::uint64_t> CompletionQueue::take() {
    // The event is cleared first. An entry that is added afterwards sets it again.
    if (eventfd_t count = 0; event_) {
        eventfd_read(event_.get(), &count);
    }
    return take_entries();
}

std::vector<std::uint64_t> CompletionQueue::take_entries() {
    std::vector<std::uint64_t> tokens;
    if (newest_.load(std::memory_order_relaxed) == nullptr) {
        return tokens;
    }
    for (Entry* entry = newest_.exchange(nullptr, std::memory_order_acquire); entry != nullptr;) {
        const std::unique_ptr<Entry> taken(entry);
        tokens.push_back(taken->token);
        entry = taken->next;
    }
    std::reverse(tokens.begin(), tokens.end());
    return tokens;
}

} // namespace gdrkit::engine
