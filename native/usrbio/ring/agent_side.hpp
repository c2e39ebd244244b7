// The agent's side of a ring: claims submissions and posts completions. Another process, which may be faulty or
// hostile, writes the memory. Each value is copied once and then checked. A ring with an invalid value is broken,
// permanently. One thread may use it at a time. No function allocates or throws after attach().
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
    std::uint32_t position; // Argument of complete().
};

class AgentRing {
public:
    // Creates the agent's side of a ring.
    //
    // io_depth: > 0: batches of exactly that many; 0: everything at once; < 0: at most -io_depth in a batch, and a
    // timeout above 0 holds an incomplete batch for that long. The memory stays the caller's and must outlive the ring.
    //
    // Returns 0; -EINVAL: no ring has that size, io_depth exceeds its entries, or its indices are out of range; or
    // -ENOMEM.
    static int attach(void* memory, std::size_t bytes, std::int32_t io_depth, std::int64_t timeout_ns,
                      std::unique_ptr<AgentRing>& ring) noexcept;
    // Reports to the application that no more completions come, and wakes it.
    ~AgentRing();
    AgentRing(const AgentRing&) = delete;
    AgentRing& operator=(const AgentRing&) = delete;

    // Copies the due submissions into `out` and returns their number, at most as many as the completion queue has space
    // for. With io_depth < 0 a call returns at most one batch. Call it until it returns 0. now_ns: time of any steady
    // clock; it is only used for an incomplete batch that is held.
    std::size_t claim(std::span<ClaimedOperation> out, std::int64_t now_ns) noexcept;

    // Time at which a held batch is due, on the clock of claim(); -1: no batch is held.
    std::int64_t held_until_ns() const noexcept { return held_until_ns_; }

    // Completes the operation of that position; any order is allowed. Returns false if no such operation was claimed.
    // The application sees the completion after flush().
    bool complete(std::uint32_t position, std::int64_t result) noexcept;

    // Publishes the completions since the last call, and wakes the application if it sleeps.
    void flush() noexcept;

    // Call it before the agent's thread sleeps on the submit semaphore; it announces the sleep. Returns false if there
    // is work or the ring is broken: do not sleep, the announcement is withdrawn.
    bool prepare_to_sleep() noexcept;
    // Call it after the sleep, for every ring whose prepare_to_sleep() returned true.
    void end_sleep() noexcept {
        announcement_.withdraw();
        slept_for_work_ =
            view_.indices->submission_head.load(std::memory_order_relaxed) != static_cast<std::int32_t>(seen_head_);
    }

    // The application wrote an invalid value, and the ring has been ended. Remove it when outstanding() is 0.
    bool broken() const noexcept { return broken_; }
    // Number of operations that are claimed and not completed.
    std::uint32_t outstanding() const noexcept { return outstanding_; }
    std::uint32_t entries() const noexcept { return view_.slots - 1; }

private:
    struct Position {
        std::uint64_t userdata;
        std::int32_t index;
        std::uint32_t state; // 0 free, 1 claimed, 2 done.
    };

    AgentRing(const RingView& view, std::int32_t io_depth, std::int64_t timeout_ns);
    std::size_t update_due(std::uint32_t available, std::int64_t now_ns) noexcept;
    std::uint32_t completion_space() noexcept;
    void announce_end() noexcept;
    void mark_broken() noexcept;

    RingView view_;
    SleepAnnouncement announcement_;
    std::int32_t io_depth_;
    std::int64_t timeout_ns_;
    std::int64_t held_until_ns_ = -1;
    std::vector<Position> positions_;
    std::uint32_t claimed_ = 0;   // The next submission to claim.
    std::uint32_t seen_head_ = 0; // The last submission_head that was read.
    // All submissions before it are completed. It is never read from the shared memory.
    std::uint32_t submission_tail_ = 0;
    std::uint32_t completion_head_ = 0;
    std::uint32_t completion_tail_ = 0; // The last completion_tail that was read.
    std::uint32_t due_ = 0;             // Submissions that are due by the rules of io_depth, and not claimed yet.
    std::uint32_t outstanding_ = 0;
    std::uint32_t unpublished_ = 0;
    bool slept_for_work_ = false;         // The last sleep ended with new submissions.
    bool nothing_due_ = true;             // The last claim() found no due submission.
    bool lacks_completion_space_ = false; // Due submissions wait for space in the completion queue.
    bool broken_ = false;
};

} // namespace gdrkit::usrbio
