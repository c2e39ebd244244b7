// Completion queues: queue pairs push completions and the client polls them. This file also implements ibv_create_cq,
// ibv_resize_cq and ibv_destroy_cq. Extended queues are in extended_completion.cpp.

#include "ibverbs/completion.hpp"

#include <chrono>
#include <thread>

#include "ibverbs/device_clock.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/parallel_copy.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

bool is_valid_cqe(const Context& context, std::uint32_t cqe) {
    return cqe >= 1 && cqe <= static_cast<std::uint32_t>(make_device_attributes(*context.device).max_cqe);
}

} // namespace

bool CompletionQueue::push(std::span<const Completion> completions) {
    std::lock_guard lock(mutex_);
    bool must_notify = false;
    bool has_pushed_all = true;
    for (const Completion& completion : completions) {
        if (!push_one(completion)) {
            has_pushed_all = false;
            break;
        }
        // A failed completion always counts as solicited.
        const bool is_solicited = completion.is_solicited || completion.wc.status != IBV_WC_SUCCESS;
        must_notify |= armed_ == Armed::any || (armed_ == Armed::solicited && is_solicited);
    }
    has_completions_or_overrun_ = !completions_.empty() || has_overrun_;
    if (must_notify) {
        armed_ = Armed::no;
        channel_->events.push({public_cq_, channel_event_counter});
    }
    return has_pushed_all;
}

bool CompletionQueue::push_one(const Completion& completion) {
    if (has_overrun_) {
        return false;
    }
    if (completions_.size() == capacity_) {
        if (!options_.ignores_overrun) {
            has_overrun_ = true;
            context_->raise(public_cq_, IBV_EVENT_CQ_ERR, async_event_counter);
            return false;
        }
        // The client has asked to ignore overruns, so the oldest completion is lost. The slots that it covers are
        // then never freed.
        completions_.pop_front();
    }
    completions_.push_back(completion);
    if (options_.has_timestamps) {
        completions_.back().device_cycles = read_device_cycles();
        completions_.back().wallclock_ns = read_clock_ns(CLOCK_REALTIME);
    }
    return true;
}

// Remove the first completion and free the slots that it covers. The caller holds the lock.
void CompletionQueue::pop_first() {
    const Completion& first_completion = completions_.front();
    first_completion.work_queue_slots->used_count -= first_completion.freed_slot_count;
    completions_.pop_front();
    has_completions_or_overrun_ = !completions_.empty();
}

// If the queue is empty, let its queue pairs make progress. Return whether a poll still has nothing to report: neither
// a completion nor an overrun.
bool CompletionQueue::is_idle_after_progress() {
    if (!has_completions_or_overrun_) {
        progress();
    }
    if (!has_completions_or_overrun_) {
        // A program that polls without pause must leave the processor to the threads on which its completions depend.
        ParallelCopy::yield_processor();
    }
    return !has_completions_or_overrun_;
}

int CompletionQueue::poll(int count, ibv_wc* wc) {
    if (is_idle_after_progress()) {
        return 0;
    }
    std::lock_guard lock(mutex_);
    if (has_overrun_) {
        return -EIO;
    }
    int polled_count = 0;
    while (polled_count < count && !completions_.empty()) {
        wc[polled_count++] = completions_.front().wc;
        pop_first();
    }
    return polled_count;
}

int CompletionQueue::take(Completion* completion) {
    if (is_idle_after_progress()) {
        return ENOENT;
    }
    std::lock_guard lock(mutex_);
    if (has_overrun_) {
        return EIO;
    }
    if (completions_.empty()) {
        return ENOENT;
    }
    *completion = completions_.front();
    pop_first();
    return 0;
}

int CompletionQueue::resize(std::size_t capacity) {
    std::unique_lock lock(mutex_);
    // Soft-RoCE carries out many requests in the call that posts them, so the check below sees their completions. In
    // the twin, threads carry the requests out later. Give the threads 20 ms: if the twin accepted a smaller size too
    // early, the completions of these requests would overrun the queue.
    for (int attempt = 0; attempt < 20 && capacity < capacity_ && completions_.size() <= capacity; ++attempt) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        lock.lock();
    }
    // Soft-RoCE refuses a size below the number of queued completions (rxe_cq_chk_attr).
    if (completions_.size() > capacity) {
        return EINVAL;
    }
    capacity_ = capacity;
    return 0;
}

void CompletionQueue::arm(bool solicited_only) {
    {
        std::lock_guard lock(mutex_);
        if (channel_ == nullptr) {
            return;
        }
        // A request for solicited completions does not weaken an earlier request for all completions.
        if (armed_ != Armed::any) {
            armed_ = solicited_only ? Armed::solicited : Armed::any;
        }
    }
    // The client now waits for an event and may not poll, so threads of the twin must handle responses.
    std::lock_guard lock(polled_works_mutex_);
    for (PolledWork* const work : polled_works_) {
        work->request_wake_for_responses();
    }
}

bool CompletionQueue::is_armed() {
    std::lock_guard lock(mutex_);
    return armed_ != Armed::no;
}

void CompletionQueue::add_work(PolledWork* work) {
    std::lock_guard lock(polled_works_mutex_);
    polled_works_.push_back(work);
}

void CompletionQueue::remove_work(PolledWork* work) {
    std::lock_guard lock(polled_works_mutex_);
    std::erase(polled_works_, work);
}

void CompletionQueue::progress() {
    const std::unique_lock lock(polled_works_mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
        for (PolledWork* const work : polled_works_) {
            work->progress_at_poll();
        }
    }
}

void CompletionQueue::drop_completions_of(std::uint32_t qp_num) {
    std::lock_guard lock(mutex_);
    std::erase_if(completions_, [=](const Completion& completion) {
        if (completion.wc.qp_num != qp_num) {
            return false;
        }
        // Free the slots, because a shared receive queue outlives the queue pair.
        completion.work_queue_slots->used_count -= completion.freed_slot_count;
        return true;
    });
}

void acknowledge_async(ibv_cq* cq) {
    ++cq->async_events_completed;
    get_cq_handle(cq)->impl->async_event_counter->acknowledge(1);
}

int poll_completions(ibv_cq* cq, int num_entries, ibv_wc* wc) {
    static FaultSite site("ibv_poll_cq");
    if (const auto fault = find_injected_fault(&site)) {
        return -*fault;
    }
    if (!is_alive("ibv_cq", cq) || num_entries < 0) {
        return -EINVAL;
    }
    CompletionQueueHandle* const handle = get_cq_handle(cq);
    // Only an extended queue has start_poll. Its lock is held from ibv_start_poll to ibv_end_poll.
    if (handle->public_cq.start_poll == nullptr) {
        return handle->impl->poll(num_entries, wc);
    }
    handle->poll_lock.acquire();
    const int count = handle->impl->poll(num_entries, wc);
    handle->poll_lock.release();
    return count;
}

int request_notification(ibv_cq* cq, int solicited_only) {
    if (const auto fault = find_injected_fault("ibv_req_notify_cq")) {
        return *fault;
    }
    if (!is_alive("ibv_cq", cq)) {
        return EINVAL;
    }
    get_cq_handle(cq)->impl->arm(solicited_only != 0);
    return 0;
}

CompletionQueueHandle* create_completion_queue(ibv_context* public_context, const CompletionQueueRequest& request) {
    Context* const context = get_context(public_context);
    ibv_comp_channel* const channel = request.channel;
    if (!is_alive("ibv_context", context) || !is_valid_cqe(*context, request.cqe) ||
        request.comp_vector >= static_cast<std::uint32_t>(completion_vector_count) ||
        (channel != nullptr && (!is_alive("ibv_comp_channel", channel) || channel->context != public_context))) {
        return fail_null(EINVAL);
    }
    auto handle = std::make_unique<CompletionQueueHandle>();
    auto* const cq = reinterpret_cast<ibv_cq*>(&handle->public_cq);
    cq->context = public_context;
    cq->channel = channel;
    cq->cq_context = request.cq_context;
    cq->handle = make_next_handle();
    cq->cqe = static_cast<int>(request.cqe);
    pthread_mutex_init(&cq->mutex, nullptr);
    pthread_cond_init(&cq->cond, nullptr);
    handle->impl = std::make_shared<CompletionQueue>(context, get_channel(channel), cq, request.cqe, request.options);
    ++context->child_count;
    if (channel != nullptr) {
        ++get_channel(channel)->user_count;
        ++channel->refcnt;
    }
    if (request.parent_domain != nullptr) {
        handle->parent_domain = request.parent_domain;
        ++request.parent_domain->child_count;
    }
    track("ibv_cq", handle.get());
    return handle.release();
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_cq* ibv_create_cq(ibv_context* context, int cqe, void* cq_context, ibv_comp_channel* channel, int comp_vector) {
    if (const auto fault = find_injected_fault("ibv_create_cq")) {
        return fail_null(*fault);
    }
    if (cqe < 1 || comp_vector < 0) {
        return fail_null(EINVAL);
    }
    CompletionQueueHandle* const handle = create_completion_queue(
        context,
        {static_cast<std::uint32_t>(cqe), cq_context, channel, static_cast<std::uint32_t>(comp_vector), {}, nullptr});
    return reinterpret_cast<ibv_cq*>(handle);
}

int ibv_resize_cq(ibv_cq* cq, int cqe) {
    if (const auto fault = find_injected_fault("ibv_resize_cq")) {
        return *fault;
    }
    if (!is_alive("ibv_cq", cq) || cqe < 1 ||
        !is_valid_cqe(*get_context(cq->context), static_cast<std::uint32_t>(cqe))) {
        return EINVAL;
    }
    const int error = get_cq_handle(cq)->impl->resize(static_cast<std::size_t>(cqe));
    if (error == 0) {
        cq->cqe = cqe;
    }
    return error;
}

int ibv_destroy_cq(ibv_cq* cq) {
    if (const auto fault = find_injected_fault("ibv_destroy_cq")) {
        return *fault;
    }
    CompletionQueueHandle* const handle = get_cq_handle(cq);
    if (!is_alive("ibv_cq", handle)) {
        return EINVAL;
    }
    if (handle->impl->user_count != 0) {
        return EBUSY;
    }
    const std::shared_ptr<CompletionQueue> completion_queue = handle->impl;
    ProtectionDomain* const parent_domain = handle->parent_domain;
    Context* const context = completion_queue->context();
    context->drop_events(completion_queue->async_event_counter);
    if (CompletionChannel* const channel = completion_queue->channel()) {
        channel->events.drop_if([=](const CompletionEvent& event) { return event.cq == cq; });
    }
    // The client may use the pointer `cq` of an event until it has acknowledged the event.
    completion_queue->channel_event_counter->wait_until_acknowledged();
    completion_queue->async_event_counter->wait_until_acknowledged();
    if (!retire("ibv_cq", handle)) {
        return EINVAL;
    }
    handle->impl.reset();
    if (CompletionChannel* const channel = completion_queue->channel()) {
        --channel->user_count;
        --channel->public_channel.refcnt;
    }
    if (parent_domain != nullptr) {
        --parent_domain->child_count;
    }
    --context->child_count;
    return 0;
}

} // extern "C"
