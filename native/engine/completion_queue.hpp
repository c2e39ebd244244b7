// The tokens of ended jobs, which any thread adds and one reader takes in batches.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/descriptor.hpp"

namespace gdrkit::engine {

// A queue without a lock, so that a forked child can use the queue of its parent, and a finalizer can add to it.
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
    // Frees the entries. The eventfd is not read: a forked child shares it with its parent, whose wake-up it would
    // take.
    ~CompletionQueue() { take_entries(); }

    // Adds a token. The caller allocates the entry beforehand, so that the end of a job cannot fail.
    void push(std::unique_ptr<Entry> entry) noexcept;
    // Removes all tokens, and returns them in the order of their addition.
    std::vector<std::uint64_t> take();
    // Returns the eventfd for poll(2), or -1. The queue owns it.
    int event_fd() const noexcept { return event_.get(); }

private:
    std::vector<std::uint64_t> take_entries();

    std::atomic<Entry*> newest_{nullptr};
    Descriptor event_;
};

} // namespace gdrkit::engine
