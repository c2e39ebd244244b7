// Implements completion channels: create, destroy, get and acknowledge events.

#include "ibverbs/completion_channel.hpp"

#include "ibverbs/completion.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_comp_channel* ibv_create_comp_channel(ibv_context* public_context) {
    if (const auto fault = find_injected_fault("ibv_create_comp_channel")) {
        return fail_null(*fault);
    }
    Context* const context = get_context(public_context);
    if (!is_alive("ibv_context", context)) {
        return fail_null(EINVAL);
    }
    auto channel = std::make_unique<CompletionChannel>();
    if (const int error = channel->events.open(); error != 0) {
        return fail_null(error);
    }
    channel->public_channel.context = public_context;
    channel->public_channel.fd = channel->events.fd();
    channel->context = context;
    ++context->child_count;
    track("ibv_comp_channel", channel.get());
    return &channel.release()->public_channel;
}

int ibv_destroy_comp_channel(ibv_comp_channel* public_channel) {
    if (const auto fault = find_injected_fault("ibv_destroy_comp_channel")) {
        return *fault;
    }
    CompletionChannel* const channel = get_channel(public_channel);
    if (!is_alive("ibv_comp_channel", channel)) {
        return EINVAL;
    }
    if (channel->user_count != 0) {
        return EBUSY;
    }
    Context* const context = channel->context;
    if (!retire("ibv_comp_channel", channel)) {
        return EINVAL;
    }
    channel->events.close();
    public_channel->fd = -1;
    --context->child_count;
    return 0;
}

int ibv_get_cq_event(ibv_comp_channel* public_channel, ibv_cq** cq, void** cq_context) {
    if (const auto fault = find_injected_fault("ibv_get_cq_event")) {
        return fail_minus1(*fault);
    }
    CompletionChannel* const channel = get_channel(public_channel);
    if (!is_alive("ibv_comp_channel", channel)) {
        return fail_minus1(EINVAL);
    }
    CompletionEvent event;
    const int error = channel->events.take(&event, [&](const CompletionEvent& taken_event) {
        taken_event.counter->count_taken();
        *cq = taken_event.cq;
        *cq_context = taken_event.cq->cq_context;
    });
    return error == 0 ? 0 : fail_minus1(error);
}

void ibv_ack_cq_events(ibv_cq* cq, unsigned int nevents) {
    if (is_alive("ibv_cq", cq)) {
        cq->comp_events_completed += nevents;
        get_cq_handle(cq)->impl->channel_event_counter->acknowledge(nevents);
    }
}

} // extern "C"
