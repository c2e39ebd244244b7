// Completion queues (CQ): queue pairs push completions, and the client polls them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <semaphore>
#include <span>
#include <vector>

#include "ibverbs/completion_channel.hpp"
#include "ibverbs/context.hpp"
#include "ibverbs/protection_domain.hpp"

namespace gdrkit::twin::verbs {

// The number of used slots of a send or receive queue. A slot becomes free when the completion that covers it is
// polled, not earlier. Hardware behaves the same: a send queue of unsignaled requests fills up.
struct WorkQueueSlots {
    std::atomic<std::uint32_t> used_count{0};
};

struct Completion {
    ibv_wc wc{};
    bool is_solicited = false;
    std::shared_ptr<WorkQueueSlots> work_queue_slots; // of the queue to which the completed request was posted
    std::uint32_t freed_slot_count = 0;               // slots that polling this completion frees
    // The time of the completion in cycles of the device's clock, and in nanoseconds of CLOCK_REALTIME. The queue sets
    // them if it was created with timestamps.
    std::uint64_t device_cycles = 0;
    std::uint64_t wallclock_ns = 0;
};

// Options of a completion queue that ibv_create_cq_ex can set. ibv_create_cq leaves them all false.
struct CompletionQueueOptions {
    bool has_timestamps = false;
    // If the queue is full, a new completion replaces the oldest one. Without this option, the queue fails (overrun).
    bool ignores_overrun = false;
};

// Work that a thread of the application can do when it polls a completion queue.
class PolledWork {
public:
    // Do the part of the work that needs no waiting.
    virtual void progress_at_poll() = 0;
    // Let a thread of the twin handle the next response, because the application will not poll before the next event.
    virtual void request_wake_for_responses() = 0;

protected:
    ~PolledWork() = default;
};

class CompletionQueue {
public:
    CompletionQueue(Context* context, CompletionChannel* channel, ibv_cq* public_cq, std::size_t capacity,
                    CompletionQueueOptions options)
        : context_(context), channel_(channel), public_cq_(public_cq), options_(options), capacity_(capacity) {}

    // Append completions. Return false if the queue is full (overrun). After an overrun nothing more can be polled.
    bool push(std::span<const Completion> completions);

    // Move up to `count` completions into `wc`. Return their number, or a negative errno after an overrun.
    int poll(int count, ibv_wc* wc);

    // Move the next completion into *completion, for the extended poll functions. Return 0, ENOENT (the queue is empty)
    // or EIO (overrun).
    int take(Completion* completion);

    // Change the capacity (ibv_resize_cq). Return EINVAL if the queue holds more completions than would fit.
    int resize(std::size_t capacity);

    // Request one event on the channel for the next completion (ibv_req_notify_cq). With `solicited_only`, only a
    // solicited or failed completion raises the event.
    void arm(bool solicited_only);

    // Return whether the client waits for an event that was not raised yet.
    [[nodiscard]] bool is_armed();

    // Add work for the threads that poll this queue while it is empty. After remove_work has returned, no thread does
    // the removed work.
    void add_work(PolledWork* work);
    void remove_work(PolledWork* work);

    // Remove the completions of a queue pair that is reset or destroyed.
    void drop_completions_of(std::uint32_t qp_num);

    [[nodiscard]] Context* context() const { return context_; }
    [[nodiscard]] CompletionChannel* channel() const { return channel_; }

    // Number of send and receive queues whose completions go to this queue.
    std::atomic<int> user_count{0};
    // Count the events of this queue that the client took and acknowledged: events on the channel, asynchronous events.
    std::shared_ptr<EventCounter> channel_event_counter = std::make_shared<EventCounter>();
    std::shared_ptr<EventCounter> async_event_counter = std::make_shared<EventCounter>();

private:
    // Let the queue pairs make progress, unless another thread does so.
    void progress();
    bool push_one(const Completion& completion);
    void pop_first();
    bool is_idle_after_progress();

    // The completions that raise the next event on the channel.
    enum class Armed { no, solicited, any };

    Context* const context_;
    CompletionChannel* const channel_;
    ibv_cq* const public_cq_; // the structure that the client has
    const CompletionQueueOptions options_;
    std::mutex mutex_;
    std::size_t capacity_;
    std::deque<Completion> completions_;
    Armed armed_ = Armed::no;
    bool has_overrun_ = false;
    std::mutex polled_works_mutex_; // a thread that also locks a queue pair locks this mutex first
    std::vector<PolledWork*> polled_works_;
    // Lets poll() return 0 without the lock while there is nothing to report.
    std::atomic<bool> has_completions_or_overrun_{false};
};

struct CompletionQueueHandle {
    // The structure to which the client has a pointer. It begins with an ibv_cq. Its further fields are zero unless
    // ibv_create_cq_ex made the queue.
    ibv_cq_ex public_cq{};
    std::shared_ptr<CompletionQueue> impl;
    // The parent domain of an extended queue, or nullptr.
    ProtectionDomain* parent_domain = nullptr;
    // A thread that polls an extended queue holds this lock: from ibv_start_poll to ibv_end_poll, or during
    // ibv_poll_cq.
    std::binary_semaphore poll_lock{1};
    bool is_in_extended_poll = false;
    // The completion that the read functions of the extended queue describe.
    Completion current_completion;
};

inline CompletionQueueHandle* get_cq_handle(ibv_cq* cq) {
    return reinterpret_cast<CompletionQueueHandle*>(cq);
}

// Arguments of the functions that create a completion queue.
struct CompletionQueueRequest {
    std::uint32_t cqe = 0; // capacity, in completions
    void* cq_context = nullptr;
    ibv_comp_channel* channel = nullptr;
    std::uint32_t comp_vector = 0;
    CompletionQueueOptions options;
    ProtectionDomain* parent_domain = nullptr;
};

// Create a completion queue. Return nullptr and set errno to EINVAL if an argument is invalid.
CompletionQueueHandle* create_completion_queue(ibv_context* context, const CompletionQueueRequest& request);

// Acknowledge one asynchronous event of this queue. ibv_ack_async_event calls this function.
void acknowledge_async(ibv_cq* cq);

} // namespace gdrkit::twin::verbs
