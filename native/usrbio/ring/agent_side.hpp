// The agent's side of a ring: claims submissions and posts completions.
//
// The application, another process that may be faulty or hostile, writes the same memory. Therefore each value is
// copied once and then checked, and the first invalid value breaks the ring permanently. Only one thread at a time may
// call the functions of an AgentRing. No function allocates or throws after attach().
#pragma once

#include "usrbio/ring/announcement.hpp"
#include "usrbio/ring/view.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace gdrkit::usrbio {

struct ClaimedOperation {
    Arguments arguments;
    std::uint32_t position; // Position in the submission queue, which complete() takes.
};

class AgentRing {
public:
    // Creates the agent's side of a ring.
    //
    // io_depth > 0: the agent claims batches of exactly io_depth submissions. io_depth == 0: it claims all submissions
    // at once. io_depth < 0: it claims batches of at most -io_depth submissions, and an incomplete batch only after it
    // has waited `timeout_ns` for more submissions. The caller keeps the memory mapped for longer than the ring exists.
    //
    // Returns 0, -ENOMEM or -EINVAL. -EINVAL: `bytes` is too small or too large for a ring, a batch of io_depth exceeds
    // the entries of the ring, timeout_ns is negative, or the indices in the memory are out of range.
    static int attach(void* memory, std::size_t bytes, std::int32_t io_depth, std::int64_t timeout_ns,
                      std::unique_ptr<AgentRing>& ring) noexcept;
    // Announces to the application that no more completions come, and wakes the application.
    ~AgentRing();
    AgentRing(const AgentRing&) = delete;
    AgentRing& operator=(const AgentRing&) = delete;

    // Copies submissions into `claimed` and returns their number. A submission can be claimed when it is due by the
    // rules of io_depth (see attach()) and the completion queue has space for its completion. With io_depth < 0, claims
    // at most one batch, so call claim() until it returns 0. now_ns: time of any steady clock, for the timeout of an
    // incomplete batch.
    std::size_t claim(std::span<ClaimedOperation> claimed, std::int64_t now_ns) noexcept;

    // Returns the time until which claim() holds an incomplete batch back (see attach()), on the clock of claim();
    // -1: it holds none back.
    std::int64_t held_until_ns() const noexcept { return held_until_ns_; }

    // Completes the claimed operation at `position`; operations may complete in any order. Returns false if no claimed
    // operation has this position. The application sees the completion after flush().
    bool complete(std::uint32_t position, std::int64_t result) noexcept;

    // Publishes the completions since the last call, and wakes the application if the application sleeps.
    void flush() noexcept;

    // Announces that the agent's thread will sleep on the submit semaphore. If there is work or the ring is broken,
    // withdraws the announcement and returns false; the thread must not sleep then.
    bool prepare_to_sleep() noexcept;
    // Withdraws the announcement. Call it after the sleep, for every ring whose prepare_to_sleep() returned true.
    void end_sleep() noexcept {
        sleep_announcement_.withdraw();
        found_work_after_sleep_ = view_.indices->submission_head.load(std::memory_order_relaxed) !=
                                  static_cast<std::int32_t>(last_seen_head_);
    }

    // Returns true if the application wrote an invalid value. The agent claims nothing more from such a ring, and
    // removes the ring when outstanding() is 0.
    bool is_broken() const noexcept { return is_broken_; }
    // Returns the number of operations that are claimed and not completed.
    std::uint32_t outstanding() const noexcept { return outstanding_count_; }
    // Returns the number of the processor on which the application last submitted. A negative number means that the
    // processor is not known. The application may have written any number, so the caller must check it.
    int application_processor() const noexcept {
        return static_cast<int>(view_.extension->application.processor.load(std::memory_order_relaxed) - 1);
    }
    std::uint32_t entries() const noexcept { return view_.slot_count - 1; }

private:
    enum class SubmissionState : std::uint32_t { free, claimed, completed };
    // The submission that claim() took from one position of the submission queue. `state`: free if the position has no
    // submission that is claimed or completed.
    struct ClaimedSubmission {
        std::uint64_t userdata;
        std::int32_t index;
        SubmissionState state;
    };

    AgentRing(const RingView& view, std::int32_t io_depth, std::int64_t timeout_ns);
    std::size_t update_due_count(std::uint32_t available, std::int64_t now_ns) noexcept;
    std::uint32_t count_free_completions() noexcept;
    std::uint32_t count_unreaped_completions() const noexcept;
    void announce_end() noexcept;
    void mark_broken() noexcept;

    RingView view_;
    SleepAnnouncement sleep_announcement_;
    std::int32_t io_depth_;
    std::int64_t timeout_ns_;
    std::int64_t held_until_ns_ = -1;                    // The time that held_until_ns() returns.
    std::vector<ClaimedSubmission> claimed_submissions_; // One element for each position in the submission queue.
    std::uint32_t next_to_claim_ = 0;                    // Position of the next submission to claim.
    std::uint32_t last_seen_head_ = 0;                   // The last submission_head that was read.
    // All submissions before this position are completed. The agent writes this position to the shared memory, but
    // never reads it from there.
    std::uint32_t submission_tail_ = 0;
    std::uint32_t completion_head_ = 0;   // Position of the next completion to write.
    std::uint32_t completion_tail_ = 0;   // The last completion_tail that was read.
    std::uint32_t due_count_ = 0;         // Submissions that are due by the rules of io_depth, and not claimed yet.
    std::uint32_t outstanding_count_ = 0; // Operations that are claimed and not completed.
    std::uint32_t unpublished_count_ = 0; // Completions since the last flush().
    bool found_work_after_sleep_ = false; // New submissions had arrived when the last sleep ended.
    bool last_claim_found_nothing_due_ = true;        // The last claim() found no due submission.
    bool last_claim_lacked_completion_space_ = false; // Due submissions wait for space in the completion queue.
    bool is_broken_ = false;
};

} // namespace gdrkit::usrbio
