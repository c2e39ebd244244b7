// Completion queues.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <span>

#include "ibverbs/completion_channel.hpp"
#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

// How many places of a work queue are taken. A place is free again when the completion that covers it was polled, not
// before: so it is on hardware, where a queue of unsignaled requests fills up.
struct Slots {
    std::atomic<std::uint32_t> taken{0};
};

struct Completion {
    ibv_wc wc{};
    bool solicited = false;
    std::shared_ptr<Slots> slots;
    std::uint32_t freed = 0;
};

class CompletionQueue {
public:
    CompletionQueue(Context* context, CompletionChannel* channel, ibv_cq* abi, std::size_t capacity)
        : context_(context), channel_(channel), abi_(abi), capacity_(capacity) {}

    // False when there was no room: the queue has overrun, which cannot be mended, and nothing more comes out of it.
    bool push(std::span<const Completion> completions);

    // The number of completions taken, or a negative number after an overrun.
    int poll(int count, ibv_wc* wc);

    void arm(bool solicited_only);

    // Forgets the completions of a queue pair that is reset or destroyed.
    void drop(std::uint32_t qp_num);

    [[nodiscard]] Context* context() const { return context_; }
    [[nodiscard]] CompletionChannel* channel() const { return channel_; }

    // Queue pairs that complete here.
    std::atomic<int> users{0};
    std::shared_ptr<EventAccount> channel_events = std::make_shared<EventAccount>();
    std::shared_ptr<EventAccount> async_events = std::make_shared<EventAccount>();

private:
    bool push_one(const Completion& completion);

    enum class Armed { no, solicited, any };

    Context* const context_;
    CompletionChannel* const channel_;
    ibv_cq* const abi_;
    const std::size_t capacity_;
    std::mutex mutex_;
    std::deque<Completion> completions_;
    Armed armed_ = Armed::no;
    bool overrun_ = false;
    // Of the queue and the overrun, for who polls in vain.
    std::atomic<bool> worth_a_look_{false};
};

struct CompletionQueueHandle {
    // The extended structure begins with the ordinary one; it has room for clients that look further.
    ibv_cq_ex abi{};
    std::shared_ptr<CompletionQueue> model;
};

inline CompletionQueueHandle* find_queue(ibv_cq* cq) {
    return reinterpret_cast<CompletionQueueHandle*>(cq);
}

// For ibv_ack_async_event.
void acknowledge_async(ibv_cq* cq);

} // namespace gdrkit::twin::verbs
