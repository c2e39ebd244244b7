// The application's side of a ring. Two threads at a time: one prepares and submits, one reaps; they share nothing but
// the free slots on their way back. Nothing here makes a system call, but for the post
// to who reaps when who prepares finds the ring broken.
#pragma once

#include "usrbio/ring/announcement.hpp"
#include "usrbio/ring/view.hpp"

#include <cstdint>
#include <memory>

namespace gdrkit::usrbio {

class ApplicationRing {
public:
    // The memory stays the caller's and outlives the ring. 0, or -EINVAL: no ring fits the size, or its indices are out
    // of range; or -ENOMEM.
    static int attach(void* memory, std::size_t bytes, std::unique_ptr<ApplicationRing>& ring) noexcept;
    ApplicationRing(const ApplicationRing&) = delete;
    ApplicationRing& operator=(const ApplicationRing&) = delete;

    // -- the thread that prepares -------------------------------------------------------------------------------

    // The index of the operation, or -EAGAIN: as many as the ring holds are under way. The agent sees it after
    // submit().
    int prepare(const std::uint8_t (&buffer_id)[16], std::uint64_t buffer_offset, std::uint64_t file_inode,
                std::uint64_t file_offset, std::uint64_t length, std::uint64_t userdata) noexcept {
        const std::uint32_t next = view_.next(head_);
        if ((prepared_ - freed_seen_ == entries() && !sees_free_slot()) || (next == tail_ && !sees_room(next))) {
            return -EAGAIN;
        }
        // In turn; only completions that overtook others leave gaps. One is free, or the line above had said so.
        while (in_use_[slot_].load(std::memory_order_acquire) != 0) {
            slot_ = slot_ + 1 == entries() ? 0 : slot_ + 1;
        }
        const auto index = static_cast<std::int32_t>(slot_);
        Arguments& arguments = view_.arguments[index];
        __builtin_memcpy(arguments.buffer_id, buffer_id, sizeof(buffer_id));
        arguments.buffer_offset = buffer_offset;
        arguments.file_inode = file_inode;
        arguments.file_offset = file_offset;
        arguments.length = length;
        arguments.userdata = userdata;
        view_.submissions[head_] = {index, 0, userdata};
        in_use_[index].store(1, std::memory_order_release);
        slot_ = slot_ + 1 == entries() ? 0 : slot_ + 1;
        head_ = next;
        ++prepared_;
        return index;
    }

    // Lets the agent see what was prepared. true: the agent sleeps, or does not speak the extension: post the submit
    // semaphore.
    bool submit() noexcept {
        if (published_ != head_) {
            view_.indices->submission_head.store(static_cast<std::int32_t>(head_), std::memory_order_seq_cst);
            published_ = head_;
        }
        return !agent_aware() || must_wake(view_.extension->agent);
    }

    // -- the thread that reaps ----------------------------------------------------------------------------------

    // Hands every completion that is there, `most` at most, to sink(index, result, userdata).
    template <typename Sink> std::uint32_t reap(std::uint32_t most, Sink&& sink) noexcept {
        const std::int32_t head = view_.indices->completion_head.load(std::memory_order_acquire);
        if (!view_.holds(head)) {
            broken_.store(true, std::memory_order_relaxed);
            return 0;
        }
        std::uint32_t count = 0;
        const std::uint32_t begin = completion_tail_;
        while (completion_tail_ != static_cast<std::uint32_t>(head) && count < most) {
            const Completion& completion = view_.completions[completion_tail_];
            const std::int32_t index = completion.index;
            completion_tail_ = view_.next(completion_tail_);
            // What is not under way cannot complete: passed over.
            if (view_.holds(index) && in_use_[index].load(std::memory_order_relaxed) != 0) {
                sink(index, completion.result, completion.userdata);
                give_back(index);
                ++count;
            }
        }
        if (completion_tail_ != begin) {
            view_.indices->completion_tail.store(static_cast<std::int32_t>(completion_tail_),
                                                 std::memory_order_release);
        }
        return freed(count);
    }

    // The agent is gone: hands what is under way to the sink instead of its completion, `most` at most.
    template <typename Sink>
    std::uint32_t fail_outstanding(std::uint32_t most, std::int64_t result, Sink&& sink) noexcept {
        std::uint32_t count = 0;
        for (std::uint32_t index = 0; index < view_.slots && count < most; ++index) {
            if (in_use_[index].load(std::memory_order_acquire) != 0) {
                sink(static_cast<std::int32_t>(index), result, view_.arguments[index].userdata);
                give_back(static_cast<std::int32_t>(index));
                ++count;
            }
        }
        return freed(count);
    }

    bool has_completions() const noexcept {
        return view_.indices->completion_head.load(std::memory_order_acquire) !=
               static_cast<std::int32_t>(completion_tail_);
    }

    // Before this side sleeps on completed(): announces it. false: there is a completion; the announcement is taken
    // back.
    bool prepare_to_sleep() noexcept {
        announcement_.announce();
        if (view_.indices->completion_head.load(std::memory_order_seq_cst) !=
            static_cast<std::int32_t>(completion_tail_)) {
            woke();
            return false;
        }
        return true;
    }
    void woke() noexcept { announcement_.take_back(); }
    // A wait is over, in which so many posts were waited for.
    void slept(std::uint32_t posts) noexcept { announcement_.settle(posts == 1); }

    // -- either -------------------------------------------------------------------------------------------------

    bool agent_aware() const noexcept {
        return view_.extension->agent.magic.load(std::memory_order_relaxed) == extension_magic;
    }
    // The agent wrote what cannot be.
    bool broken() const noexcept { return broken_.load(std::memory_order_relaxed); }
    // The agent is through with this ring, or it is broken.
    bool agent_ended() const noexcept {
        return broken() || (agent_aware() && view_.extension->agent.ended.load(std::memory_order_acquire) != 0);
    }
    Semaphore& completed() const noexcept { return *view_.completed; }
    std::uint32_t entries() const noexcept { return view_.slots - 1; }

private:
    explicit ApplicationRing(const RingView& view);

    bool sees_free_slot() noexcept {
        freed_seen_ = freed_.load(std::memory_order_acquire);
        return prepared_ - freed_seen_ != entries();
    }
    bool sees_room(std::uint32_t next) noexcept;
    void give_back(std::int32_t index) noexcept { in_use_[index].store(0, std::memory_order_release); }
    std::uint32_t freed(std::uint32_t count) noexcept {
        freed_.store(freed_.load(std::memory_order_relaxed) + count, std::memory_order_release);
        return count;
    }

    RingView view_;
    std::unique_ptr<std::atomic<std::uint8_t>[]> in_use_;

    alignas(64) std::uint32_t head_ = 0;
    std::uint32_t tail_ = 0;     // submission_tail as last seen.
    std::uint32_t slot_ = 0;     // Where to look for a free one.
    std::uint32_t prepared_ = 0; // Ever, as freed_; what differs is under way.
    std::uint32_t freed_seen_ = 0;
    std::uint32_t published_ = 0; // Of head_.

    alignas(64) Announcement announcement_;
    std::uint32_t completion_tail_ = 0;
    std::atomic<std::uint32_t> freed_{0};
    std::atomic<bool> broken_{false};
};

} // namespace gdrkit::usrbio
