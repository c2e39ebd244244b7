// The agent's side of a ring: takes submissions out, posts completions. Everything in the memory was written by another
// process that may be wrong or hostile: it is copied once and then checked, and a ring that says what cannot be is
// broken and stays so. One thread at a time; nothing here allocates or throws after attach().
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
    std::uint32_t position; // What complete() wants.
};

class AgentRing {
public:
    // io_depth: > 0 batches of exactly so many, 0 everything at once, < 0 at most -io_depth in a batch; and then a
    // timeout above 0 holds a batch that is short for so long. The memory stays the caller's and outlives the ring.
    // 0, or -EINVAL: no ring fits the size, io_depth is more than its entries, or its indices are out of range; or
    // -ENOMEM.
    static int attach(void* memory, std::size_t bytes, std::int32_t io_depth, std::int64_t timeout_ns,
                      std::unique_ptr<AgentRing>& ring) noexcept;
    // Tells the application that nothing more comes, and wakes it.
    ~AgentRing();
    AgentRing(const AgentRing&) = delete;
    AgentRing& operator=(const AgentRing&) = delete;

    // Copies what is due into `out` and says how much that is. With io_depth < 0 a call gives one batch at most. Never
    // more than the completion queue has room for. Call it until it gives 0. now_ns: of any clock that does not step;
    // it is looked at only where a short batch is held.
    std::size_t claim(std::span<ClaimedOperation> out, std::int64_t now_ns) noexcept;

    // When a held batch is due, on the clock of claim(); -1: none is held.
    std::int64_t held_until_ns() const noexcept { return held_until_ns_; }

    // The operation of that position is done; in any order. false: nothing with that position was claimed. The
    // application sees it after flush().
    bool complete(std::uint32_t position, std::int64_t result) noexcept;

    // Publishes the completions since the last call, and wakes the application if it needs that.
    void flush() noexcept;

    // Before the agent's thread sleeps on the submit semaphore: announces it. false: there is work (or the ring broke),
    // do not sleep; the announcement is taken back.
    bool prepare_to_sleep() noexcept;
    // After it, for every ring for which prepare_to_sleep() said true.
    void woke() noexcept {
        announcement_.take_back();
        slept_for_work_ =
            view_.indices->submission_head.load(std::memory_order_relaxed) != static_cast<std::int32_t>(seen_head_);
    }

    // The application wrote what cannot be, and the ring has told it: drop it when outstanding() is 0.
    bool broken() const noexcept { return broken_; }
    // Claimed and not completed yet.
    std::uint32_t outstanding() const noexcept { return outstanding_; }
    std::uint32_t entries() const noexcept { return view_.slots - 1; }

private:
    struct Position {
        std::uint64_t userdata;
        std::int32_t index;
        std::uint32_t state; // 0 free, 1 claimed, 2 done.
    };

    AgentRing(const RingView& view, std::int32_t io_depth, std::int64_t timeout_ns);
    std::size_t ripen(std::uint32_t available, std::int64_t now_ns) noexcept;
    std::uint32_t room() noexcept;
    void end() noexcept;
    void fail() noexcept;

    RingView view_;
    Announcement announcement_;
    std::int32_t io_depth_;
    std::int64_t timeout_ns_;
    std::int64_t held_until_ns_ = -1;
    std::vector<Position> positions_;
    std::uint32_t claimed_ = 0;         // The next submission to claim.
    std::uint32_t seen_head_ = 0;       // The last submission_head that was looked at.
    std::uint32_t submission_tail_ = 0; // Everything before it is done; what the memory says is never read back.
    std::uint32_t completion_head_ = 0;
    std::uint32_t completion_tail_ = 0; // As last seen.
    std::uint32_t ripe_ = 0; // Submissions that the rules of io_depth let through and claim() did not hand out.
    std::uint32_t outstanding_ = 0;
    std::uint32_t unpublished_ = 0;
    bool slept_for_work_ = false; // The sleep that ended last ended with submissions.
    bool nothing_due_ = true;     // As the last claim() saw it.
    bool room_short_ = false;     // Submissions wait for room in the completion queue.
    bool broken_ = false;
};

} // namespace gdrkit::usrbio
