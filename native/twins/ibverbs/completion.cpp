#include "ibverbs/completion.hpp"

#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {

bool CompletionQueue::push(std::span<const Completion> completions) {
    std::lock_guard lock(mutex_);
    bool tell = false;
    bool good = true;
    for (const Completion& completion : completions) {
        if (!push_one(completion)) {
            good = false;
            break;
        }
        // A failed completion always counts as solicited.
        const bool solicited = completion.solicited || completion.wc.status != IBV_WC_SUCCESS;
        tell |= armed_ == Armed::any || (armed_ == Armed::solicited && solicited);
    }
    worth_a_look_ = !completions_.empty() || overrun_;
    if (tell) {
        armed_ = Armed::no;
        channel_->events.push({abi_, channel_events});
    }
    return good;
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
    if (!worth_a_look_) {
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
        first.slots->taken -= first.freed;
        completions_.pop_front();
    }
    worth_a_look_ = !completions_.empty();
    return taken;
}

void CompletionQueue::arm(bool solicited_only) {
    std::lock_guard lock(mutex_);
    // A channel that is armed for any completion stays so.
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
    find_queue(cq)->model->async_events->acknowledge(1);
}

int poll_completions(ibv_cq* cq, int num_entries, ibv_wc* wc) {
    static FaultSite site("ibv_poll_cq");
    if (const auto fault = call(&site)) {
        return -*fault;
    }
    if (!alive("ibv_cq", cq) || num_entries < 0) {
        return -EINVAL;
    }
    return find_queue(cq)->model->poll(num_entries, wc);
}

int request_notification(ibv_cq* cq, int solicited_only) {
    if (const auto fault = call("ibv_req_notify_cq")) {
        return *fault;
    }
    if (!alive("ibv_cq", cq)) {
        return EINVAL;
    }
    find_queue(cq)->model->arm(solicited_only != 0);
    return 0;
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_cq* ibv_create_cq(ibv_context* abi, int cqe, void* cq_context, ibv_comp_channel* channel, int comp_vector) {
    if (const auto fault = call("ibv_create_cq")) {
        return fail_null(*fault);
    }
    Context* const context = find_context(abi);
    if (!alive("ibv_context", context) || cqe < 1 || cqe > device_attributes(*context->device).max_cqe ||
        comp_vector < 0 || comp_vector >= completion_vector_count ||
        (channel != nullptr && (!alive("ibv_comp_channel", channel) || channel->context != abi))) {
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
    handle->model =
        std::make_shared<CompletionQueue>(context, find_channel(channel), cq, static_cast<std::size_t>(cqe));
    ++context->children;
    if (channel != nullptr) {
        ++find_channel(channel)->users;
        ++channel->refcnt;
    }
    enter("ibv_cq", handle.release());
    return cq;
}

int ibv_destroy_cq(ibv_cq* cq) {
    if (const auto fault = call("ibv_destroy_cq")) {
        return *fault;
    }
    CompletionQueueHandle* const handle = find_queue(cq);
    if (!alive("ibv_cq", handle)) {
        return EINVAL;
    }
    if (handle->model->users != 0) {
        return EBUSY;
    }
    const std::shared_ptr<CompletionQueue> model = handle->model;
    Context* const context = model->context();
    context->forget(model->async_events);
    if (CompletionChannel* const channel = model->channel()) {
        channel->events.drop_if([=](const CompletionEvent& event) { return event.cq == cq; });
    }
    // Until the client has acknowledged what it took, it may hold the pointer.
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
