// The end of a job is reported in two ways: threads wait for the job's Completion, or one reader takes the tokens of
// ended jobs from a CompletionQueue, in batches.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/descriptor.hpp"

namespace gdrkit::engine {

// A queue of the tokens of ended jobs. It has no lock, so a forked child can use the queue of its parent, and a
// finalizer can add a token.
class CompletionQueue : public std::enable_shared_from_this<CompletionQueue> {
public:
    struct Entry {
        std::uint64_t token = 0;
        Entry* next = nullptr;
    };

    // With `has_event`, event_fd() is readable while the queue has tokens. Throws Error.
    explicit CompletionQueue(bool has_event);
    CompletionQueue(const CompletionQueue&) = delete;
    CompletionQueue& operator=(const CompletionQueue&) = delete;
    // Frees the entries. Does not read the eventfd: a forked child shares it with its parent, so a read in the child
    // would take a wake-up from the parent.
    ~CompletionQueue() { take_entries(); }

    // Adds the token of an entry. The caller allocates the entry before the job ends, so that the end of the job cannot
    // fail.
    void push(std::unique_ptr<Entry> entry) noexcept;
    // Removes all tokens, and returns them in the order of their addition.
    std::vector<std::uint64_t> take();
    // Returns the eventfd for poll(2), or -1 if the queue has none. The queue owns the eventfd.
    int event_fd() const noexcept { return event_.get(); }

private:
    std::vector<std::uint64_t> take_entries();

    std::atomic<Entry*> newest_entry_{nullptr};
    Descriptor event_;
};

// The end of a job, for which threads wait and which completion queues report.
class Completion {
public:
    bool is_over() const noexcept { return state_.load(std::memory_order_acquire) == over; }
    // Waits at most `timeout`. Returns whether the job is over.
    bool wait(std::chrono::nanoseconds timeout) noexcept;
    // Adds the token to the queue when the job is over, or at once if the job is already over.
    void notify(std::shared_ptr<CompletionQueue> queue, std::uint64_t token);
    // Reports the end of the job. Further calls have no effect.
    void end() noexcept;

private:
    struct Notification {
        std::shared_ptr<CompletionQueue> queue;
        std::unique_ptr<CompletionQueue::Entry> entry;
    };
    // `awaited` means that a thread sleeps until the job is over.
    enum State : std::uint32_t { running, awaited, over };

    std::atomic<std::uint32_t> state_{running};
    std::mutex mutex_; // Protects notifications_. No thread blocks in a system call while it holds the mutex.
    std::vector<Notification> notifications_;
};

} // namespace gdrkit::engine
