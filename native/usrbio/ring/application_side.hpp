// The application's side of a ring: prepares and submits operations, and reaps their completions.
//
// Two threads may use a ring at the same time: one prepares and submits, the other reaps. The threads exchange only
// two facts: which indices are free, and whether the ring is broken. No function makes a system call, with one
// exception: prepare() posts the completion semaphore if it finds an invalid index.
#pragma once

#include "usrbio/ring/announcement.hpp"
#include "usrbio/ring/view.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

namespace gdrkit::usrbio {

class ApplicationRing {
public:
    // Creates the application's side of a ring. The caller keeps the memory mapped for longer than the ring exists.
    // Returns 0; -EINVAL: `bytes` is too small or too large for a ring, or the indices in the memory are out of range;
    // or -ENOMEM.
    static int attach(void* memory, std::size_t bytes, std::unique_ptr<ApplicationRing>& ring) noexcept;
    ApplicationRing(const ApplicationRing&) = delete;
    ApplicationRing& operator=(const ApplicationRing&) = delete;

    // -- for the thread that prepares -------------------------------------------------------------------------------

    // Adds an operation to the ring. Returns the index of the operation, or -EAGAIN: all entries of the ring are in
    // flight. The agent sees the operation after submit().
    int prepare(const std::uint8_t (&buffer_id)[16], std::uint64_t buffer_offset, std::uint64_t file_inode,
                std::uint64_t file_offset, std::uint64_t length, std::uint64_t userdata) noexcept {
        const std::uint32_t next_head = view_.next(submission_head_);
        if ((prepared_count_ - last_seen_freed_count_ == entries() && !has_free_index()) ||
            (next_head == submission_tail_ && !has_queue_space(next_head))) {
            return -EAGAIN;
        }
        // Operations use ascending indices, so next_index_ is free unless completions came out of order. The check
        // above ensures that at least one index is free.
        while (is_index_in_use_[next_index_].load(std::memory_order_acquire) != 0) {
            next_index_ = next_index_ + 1 == entries() ? 0 : next_index_ + 1;
        }
        const auto index = static_cast<std::int32_t>(next_index_);
        Arguments& arguments = view_.arguments[index];
        __builtin_memcpy(arguments.buffer_id, buffer_id, sizeof(buffer_id));
        arguments.buffer_offset = buffer_offset;
        arguments.file_inode = file_inode;
        arguments.file_offset = file_offset;
        arguments.length = length;
        arguments.userdata = userdata;
        view_.submissions[submission_head_] = {index, 0, userdata};
        is_index_in_use_[index].store(1, std::memory_order_release);
        next_index_ = next_index_ + 1 == entries() ? 0 : next_index_ + 1;
        submission_head_ = next_head;
        ++prepared_count_;
        return index;
    }

    // Publishes the prepared operations to the agent. Returns true if the caller must post the submit semaphore,
    // because the agent sleeps or does not support the extension.
    bool submit() noexcept {
        if (published_submission_head_ != submission_head_) {
            view_.indices->submission_head.store(static_cast<std::int32_t>(submission_head_),
                                                 std::memory_order_seq_cst);
            published_submission_head_ = submission_head_;
            publish_processor();
        }
        return !agent_has_extension() ||
               must_wake(view_.extension->agent, [] { return std::numeric_limits<std::uint32_t>::max(); });
    }

    // -- for the thread that reaps ----------------------------------------------------------------------------------

    // Calls sink(index, result, userdata) for each of at most `count_max` available completions. Returns their
    // number.
    template <typename Sink> std::uint32_t reap(std::uint32_t count_max, Sink&& sink) noexcept {
        const std::int32_t completion_head = view_.indices->completion_head.load(std::memory_order_acquire);
        if (!view_.is_valid(completion_head)) {
            is_broken_.store(true, std::memory_order_relaxed);
            return 0;
        }
        std::uint32_t count = 0;
        const std::uint32_t completion_tail_before = completion_tail_;
        while (completion_tail_ != static_cast<std::uint32_t>(completion_head) && count < count_max) {
            const Completion& completion = view_.completions[completion_tail_];
            const std::int32_t index = completion.index;
            completion_tail_ = view_.next(completion_tail_);
            // An operation that is not in flight cannot complete; ignore it.
            if (view_.is_valid(index) && is_index_in_use_[index].load(std::memory_order_relaxed) != 0) {
                sink(index, completion.result, completion.userdata);
                mark_free(index);
                ++count;
            }
        }
        if (completion_tail_ != completion_tail_before) {
            view_.indices->completion_tail.store(static_cast<std::int32_t>(completion_tail_),
                                                 std::memory_order_release);
        }
        return publish_freed_count(count);
    }

    // Calls sink(index, result, userdata) for each of at most `count_max` operations in flight, as if they had
    // completed with `result`. Returns their number. Call it after the agent has ended.
    template <typename Sink>
    std::uint32_t fail_outstanding(std::uint32_t count_max, std::int64_t result, Sink&& sink) noexcept {
        std::uint32_t count = 0;
        for (std::uint32_t index = 0; index < view_.slot_count && count < count_max; ++index) {
            if (is_index_in_use_[index].load(std::memory_order_acquire) != 0) {
                sink(static_cast<std::int32_t>(index), result, view_.arguments[index].userdata);
                mark_free(static_cast<std::int32_t>(index));
                ++count;
            }
        }
        return publish_freed_count(count);
    }

    bool has_completions() const noexcept {
        return view_.indices->completion_head.load(std::memory_order_acquire) !=
               static_cast<std::int32_t>(completion_tail_);
    }

    // Announces that this side will sleep on completion_semaphore() until `awaited_count` completions are available. If
    // a completion is available, withdraws the announcement and returns false. The agent posts already when half of the
    // entries have completed, because another thread may need free entries for its submissions.
    bool prepare_to_sleep(std::uint32_t awaited_count = 1) noexcept {
        awaited_count = std::min(awaited_count, std::max(entries() / 2, 1U));
        // The agent reads the count after it has published completions. Both accesses are sequentially consistent, as
        // in an announcement. An equal count is not stored again, so that its cache line stays with both processors.
        auto& published_count = view_.extension->application.awaited_count;
        if (published_count.load(std::memory_order_relaxed) != awaited_count) {
            published_count.store(awaited_count, std::memory_order_seq_cst);
        }
        sleep_announcement_.announce();
        if (view_.indices->completion_head.load(std::memory_order_seq_cst) !=
            static_cast<std::int32_t>(completion_tail_)) {
            end_sleep();
            return false;
        }
        return true;
    }
    void end_sleep() noexcept { sleep_announcement_.withdraw(); }
    // Records the end of a wait in which `post_count` posts woke this side.
    void record_wait(std::uint32_t post_count) noexcept { sleep_announcement_.record_sleep_outcome(post_count == 1); }

    // -- for both threads -------------------------------------------------------------------------------------------

    bool agent_has_extension() const noexcept {
        return view_.extension->agent.magic.load(std::memory_order_relaxed) == extension_magic;
    }
    // Returns true if the agent wrote an invalid index.
    bool is_broken() const noexcept { return is_broken_.load(std::memory_order_relaxed); }
    // Returns true if the agent serves this ring no more, or wrote an invalid index.
    bool has_agent_ended() const noexcept {
        return is_broken() ||
               (agent_has_extension() && view_.extension->agent.ended.load(std::memory_order_acquire) != 0);
    }
    Semaphore& completion_semaphore() const noexcept { return *view_.completion_semaphore; }
    std::uint32_t entries() const noexcept { return view_.slot_count - 1; }

private:
    explicit ApplicationRing(const RingView& view);

    bool has_free_index() noexcept {
        last_seen_freed_count_ = freed_count_.load(std::memory_order_acquire);
        return prepared_count_ - last_seen_freed_count_ != entries();
    }
    // Reads the submission tail. Returns whether the submission queue has space for a submission, after which its head
    // is `next_head`.
    bool has_queue_space(std::uint32_t next_head) noexcept;
    void publish_processor() noexcept {
        // If sched_getcpu() fails, it returns -1, so that 0 is stored: unknown. Only a change is stored, so that the
        // cache line stays with both processors.
        const auto processor = static_cast<std::uint32_t>(sched_getcpu() + 1);
        if (processor != published_processor_) {
            published_processor_ = processor;
            view_.extension->application.processor.store(processor, std::memory_order_relaxed);
        }
    }
    void mark_free(std::int32_t index) noexcept { is_index_in_use_[index].store(0, std::memory_order_release); }
    // Adds `count` to freed_count_, so that the thread that prepares can use the free indices. Returns `count`.
    std::uint32_t publish_freed_count(std::uint32_t count) noexcept {
        freed_count_.store(freed_count_.load(std::memory_order_relaxed) + count, std::memory_order_release);
        return count;
    }

    RingView view_;
    std::unique_ptr<std::atomic<std::uint8_t>[]>
        is_index_in_use_; // For each index: 1 while its operation is in flight.

    alignas(64) std::uint32_t submission_head_ = 0; // Position of the next submission to write.
    std::uint32_t submission_tail_ = 0;             // The last submission_tail that was read.
    std::uint32_t next_index_ = 0;                  // The next index to try.
    std::uint32_t prepared_count_ = 0; // Operations prepared so far; prepared_count_ - freed_count_ are in flight.
    std::uint32_t last_seen_freed_count_ = 0;     // The last freed_count_ that the thread that prepares has read.
    std::uint32_t published_submission_head_ = 0; // The last submission_head_ that was published.
    std::uint32_t published_processor_ = 0;

    alignas(64) SleepAnnouncement sleep_announcement_;
    std::uint32_t completion_tail_ = 0;         // Position of the next completion to reap.
    std::atomic<std::uint32_t> freed_count_{0}; // Operations reaped or failed so far, whose index is free again.
    std::atomic<bool> is_broken_{false};
};

} // namespace gdrkit::usrbio
