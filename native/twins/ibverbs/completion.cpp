// Completion queues: the queue that the model pushes to and the client polls, and ibv_create_cq and ibv_destroy_cq.

#include "ibverbs/completion.hpp"

#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {

bool CompletionQueue::push(std::span<const Completion> completions) {
    std::lock_guard lock(mutex_);
    bool notify = false;
    bool ok = true;
    for (const Completion& completion : completions) {
        if (!push_one(completion)) {
            ok = false;
            break;
        }
        // A failed completion always counts as solicited.
        const bool solicited = completion.solicited || completion.wc.status != IBV_WC_SUCCESS;
        notify |= armed_ == Armed::any || (armed_ == Armed::solicited && solicited);
    }
    has_completions_or_overrun_ = !completions_.empty() || overrun_;
    if (notify) {
        armed_ = Armed::no;
        channel_->events.push({abi_, channel_events});
    }
    return ok;
}

bool CompletionQueue::push_one(const Completion& completion) {
    if (overrun_) {
        return false;
    }
    if (completions_.size() == capacity_) {
        overrun_ = true;
        context_->raise(abi_, IBV_EVENT_CQ_ERR, async_events);
        return false;
    }
    completions_.push_back(completion);
    return true;
}

int CompletionQueue::poll(int count, ibv_wc* wc) {
    if (!has_completions_or_overrun_) {
        return 0;
    }
    std::lock_guard lock(mutex_);
    if (overrun_) {
        return -EIO;
    }
    int taken = 0;
    while (taken < count && !completions_.empty()) {
        const Completion& first = completions_.front();
        wc[taken++] = first.wc;
        first.work_queue_slots->used -= first.freed_slots;
        completions_.pop_front();
    }
    has_completions_or_overrun_ = !completions_.empty();
    return taken;
}

void CompletionQueue::arm(bool solicited_only) {
    std::lock_guard lock(mutex_);
    // A request for solicited completions does not weaken an earlier request for all completions.
    if (channel_ != nullptr && armed_ != Armed::any) {
        armed_ = solicited_only ? Armed::solicited : Armed::any;
    }
}

void CompletionQueue::drop(std::uint32_t qp_num) {
    std::lock_guard lock(mutex_);
    std::erase_if(completions_, [=](const Completion& completion) { return completion.wc.qp_num == qp_num; });
}

void acknowledge_async(ibv_cq* cq) {
    ++cq->async_events_completed;
    cq_handle_of(cq)->model->async_events->acknowledge(1);
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

ibv_cq* ibv_create_cq(ibv_context* abi, int cqe, void* cq_context, ibv_comp_channel* channel, int comp_vector) {
    if (const auto fault = injected_fault("ibv_create_cq")) {
        return fail_null(*fault);
    }
    Context* const context = context_of(abi);
    if (!is_alive("ibv_context", context) || cqe < 1 || cqe > device_attributes(*context->device).max_cqe ||
        comp_vector < 0 || comp_vector >= completion_vector_count ||
        (channel != nullptr && (!is_alive("ibv_comp_channel", channel) || channel->context != abi))) {
        return fail_null(EINVAL);
    }
    auto handle = std::make_unique<CompletionQueueHandle>();
    auto* const cq = reinterpret_cast<ibv_cq*>(&handle->abi);
    cq->context = abi;
    cq->channel = channel;
    cq->cq_context = cq_context;
    cq->handle = next_handle();
    cq->cqe = cqe;
    pthread_mutex_init(&cq->mutex, nullptr);
    pthread_cond_init(&cq->cond, nullptr);
    handle->model = std::make_shared<CompletionQueue>(context, channel_of(channel), cq, static_cast<std::size_t>(cqe));
    ++context->children;
    if (channel != nullptr) {
        ++channel_of(channel)->users;
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
    if (handle->model->users != 0) {
        return EBUSY;
    }
    const std::shared_ptr<CompletionQueue> model = handle->model;
    Context* const context = model->context();
    context->drop_events(model->async_events);
    if (CompletionChannel* const channel = model->channel()) {
        channel->events.drop_if([=](const CompletionEvent& event) { return event.cq == cq; });
    }
    // The client may hold the pointer until it has acknowledged the events that it took.
    model->channel_events->wait_until_acknowledged();
    model->async_events->wait_until_acknowledged();
    if (!retire("ibv_cq", handle)) {
        return EINVAL;
    }
    handle->model.reset();
    if (CompletionChannel* const channel = model->channel()) {
        --channel->users;
        --channel->abi.refcnt;
    }
    --context->children;
    return 0;
}

} // extern "C"
