// Completion queues: queue pairs push completions and the client polls them. Also ibv_create_cq and ibv_destroy_cq.

#include "ibverbs/completion.hpp"

#include <sched.h>

#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {

bool CompletionQueue::push(std::span<const Completion> completions) {
    std::lock_guard lock(mutex_);
    bool must_notify = false;
    bool all_pushed = true;
    for (const Completion& completion : completions) {
        if (!push_one(completion)) {
            all_pushed = false;
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
    return all_pushed;
}

bool CompletionQueue::push_one(const Completion& completion) {
    if (has_overrun_) {
        return false;
    }
    if (completions_.size() == capacity_) {
        has_overrun_ = true;
        context_->raise(public_cq_, IBV_EVENT_CQ_ERR, async_event_counter);
        return false;
    }
    completions_.push_back(completion);
    return true;
}

int CompletionQueue::poll(int count, ibv_wc* wc) {
    if (!has_completions_or_overrun_) {
        progress();
    }
    if (!has_completions_or_overrun_) {
        // A program that polls without pause must leave the processor to the threads on which its completions depend.
        sched_yield();
        return 0;
    }
    std::lock_guard lock(mutex_);
    if (has_overrun_) {
        return -EIO;
    }
    int polled_count = 0;
    while (polled_count < count && !completions_.empty()) {
        const Completion& first = completions_.front();
        wc[polled_count++] = first.wc;
        first.work_queue_slots->used -= first.freed_slot_count;
        completions_.pop_front();
    }
    has_completions_or_overrun_ = !completions_.empty();
    return polled_count;
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
    std::lock_guard lock(works_mutex_);
    for (PolledWork* const work : works_) {
        work->leave_to_thread();
    }
}

bool CompletionQueue::is_armed() {
    std::lock_guard lock(mutex_);
    return armed_ != Armed::no;
}

void CompletionQueue::add_work(PolledWork* work) {
    std::lock_guard lock(works_mutex_);
    works_.push_back(work);
}

void CompletionQueue::remove_work(PolledWork* work) {
    std::lock_guard lock(works_mutex_);
    std::erase(works_, work);
}

void CompletionQueue::progress() {
    const std::unique_lock lock(works_mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
        for (PolledWork* const work : works_) {
            work->progress_at_poll();
        }
    }
}

void CompletionQueue::drop(std::uint32_t qp_num) {
    std::lock_guard lock(mutex_);
    std::erase_if(completions_, [=](const Completion& completion) {
        if (completion.wc.qp_num != qp_num) {
            return false;
        }
        // A shared receive queue outlives the queue pair.
        completion.work_queue_slots->used -= completion.freed_slot_count;
        return true;
    });
}

void acknowledge_async(ibv_cq* cq) {
    ++cq->async_events_completed;
    cq_handle_of(cq)->model->async_event_counter->acknowledge(1);
}

int poll_completions(ibv_cq* cq, int num_entries, ibv_wc* wc) {
    static FaultSite site("ibv_poll_cq");
    if (const auto fault = injected_fault(&site)) {
        return -*fault;
    }
    if (!is_alive("ibv_cq", cq) || num_entries < 0) {
        return -EINVAL;
    }
    return cq_handle_of(cq)->model->poll(num_entries, wc);
}

int request_notification(ibv_cq* cq, int solicited_only) {
    if (const auto fault = injected_fault("ibv_req_notify_cq")) {
        return *fault;
    }
    if (!is_alive("ibv_cq", cq)) {
        return EINVAL;
    }
    cq_handle_of(cq)->model->arm(solicited_only != 0);
    return 0;
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_cq* ibv_create_cq(ibv_context* public_context, int cqe, void* cq_context, ibv_comp_channel* channel,
                      int comp_vector) {
    if (const auto fault = injected_fault("ibv_create_cq")) {
        return fail_null(*fault);
    }
    Context* const context = context_of(public_context);
    if (!is_alive("ibv_context", context) || cqe < 1 || cqe > device_attributes(*context->device).max_cqe ||
        comp_vector < 0 || comp_vector >= completion_vector_count ||
        (channel != nullptr && (!is_alive("ibv_comp_channel", channel) || channel->context != public_context))) {
        return fail_null(EINVAL);
    }
    auto handle = std::make_unique<CompletionQueueHandle>();
    auto* const cq = reinterpret_cast<ibv_cq*>(&handle->public_cq);
    cq->context = public_context;
    cq->channel = channel;
    cq->cq_context = cq_context;
    cq->handle = next_handle();
    cq->cqe = cqe;
    pthread_mutex_init(&cq->mutex, nullptr);
    pthread_cond_init(&cq->cond, nullptr);
    handle->model = std::make_shared<CompletionQueue>(context, channel_of(channel), cq, static_cast<std::size_t>(cqe));
    ++context->child_count;
    if (channel != nullptr) {
        ++channel_of(channel)->user_count;
        ++channel->refcnt;
    }
    track("ibv_cq", handle.release());
    return cq;
}

int ibv_destroy_cq(ibv_cq* cq) {
    if (const auto fault = injected_fault("ibv_destroy_cq")) {
        return *fault;
    }
    CompletionQueueHandle* const handle = cq_handle_of(cq);
    if (!is_alive("ibv_cq", handle)) {
        return EINVAL;
    }
    if (handle->model->user_count != 0) {
        return EBUSY;
    }
    const std::shared_ptr<CompletionQueue> model = handle->model;
    Context* const context = model->context();
    context->drop_events(model->async_event_counter);
    if (CompletionChannel* const channel = model->channel()) {
        channel->events.drop_if([=](const CompletionEvent& event) { return event.cq == cq; });
    }
    // The client may use the pointer until it has acknowledged every event that it took.
    model->channel_event_counter->wait_until_acknowledged();
    model->async_event_counter->wait_until_acknowledged();
    if (!retire("ibv_cq", handle)) {
        return EINVAL;
    }
    handle->model.reset();
    if (CompletionChannel* const channel = model->channel()) {
        --channel->user_count;
        --channel->abi.refcnt;
    }
    --context->child_count;
    return 0;
}

} // extern "C"
