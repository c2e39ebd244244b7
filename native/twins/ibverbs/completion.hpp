// Completion queues (CQ) and the completions in them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <span>

#include "ibverbs/completion_channel.hpp"
#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

// The number of used slots of a send or receive queue. A slot becomes free when the completion that covers it is
// polled, not earlier. Hardware behaves the same: a send queue of unsignaled requests fills up.
struct WorkQueueSlots {
    std::atomic<std::uint32_t> used{0};
};

struct Completion {
    ibv_wc wc{};
    bool solicited = false;
    std::shared_ptr<WorkQueueSlots> work_queue_slots;
    std::uint32_t freed_slots = 0;
};

class CompletionQueue {
public:
    CompletionQueue(Context* context, CompletionChannel* channel, ibv_cq* abi, std::size_t capacity)
        : context_(context), channel_(channel), abi_(abi), capacity_(capacity) {}

    // Append completions. Return false on overrun; an overrun is final, and nothing more can be polled.
    bool push(std::span<const Completion> completions);

    // Move up to `count` completions into `wc`. Return their number, or a negative errno after an overrun.
    int poll(int count, ibv_wc* wc);

    // Request one event on the channel for the next completion (ibv_req_notify_cq).
    void arm(bool solicited_only);

    // Remove the completions of a queue pair that is reset or destroyed.
    void drop(std::uint32_t qp_num);

    [[nodiscard]] Context* context() const { return context_; }
    [[nodiscard]] CompletionChannel* channel() const { return channel_; }

    // Number of send and receive queues that complete here.
    std::atomic<int> users{0};
    std::shared_ptr<EventCounter> channel_events = std::make_shared<EventCounter>();
    std::shared_ptr<EventCounter> async_events = std::make_shared<EventCounter>();

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
    // Lets poll() return 0 without the lock while there is nothing to report.
    std::atomic<bool> has_completions_or_overrun_{false};
};

struct CompletionQueueHandle {
    // Begins with the ordinary structure; clients that use the extended one find zeros.
    ibv_cq_ex abi{};
    std::shared_ptr<CompletionQueue> model;
};

inline CompletionQueueHandle* cq_handle_of(ibv_cq* cq) {
    return reinterpret_cast<CompletionQueueHandle*>(cq);
}

// Acknowledge one event; called by ibv_ack_async_event.
void acknowledge_async(ibv_cq* cq);

} // namespace gdrkit::twin::verbs
