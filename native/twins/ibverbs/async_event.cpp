// Asynchronous events of a device context: the functions with which queue pairs, shared receive queues and completion
// queues raise them, and ibv_get_async_event and ibv_ack_async_event.

#include "ibverbs/completion.hpp"
#include "ibverbs/context.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {

void Context::raise(ibv_qp* qp, ibv_event_type type, const std::shared_ptr<EventCounter>& counter) {
    AsyncEvent event;
    event.public_event.element.qp = qp;
    event.public_event.event_type = type;
    event.counter = counter;
    events.push(event);
}

void Context::raise(ibv_srq* srq, ibv_event_type type, const std::shared_ptr<EventCounter>& counter) {
    AsyncEvent event;
    event.public_event.element.srq = srq;
    event.public_event.event_type = type;
    event.counter = counter;
    events.push(event);
}

void Context::raise(ibv_cq* cq, ibv_event_type type, const std::shared_ptr<EventCounter>& counter) {
    AsyncEvent event;
    event.public_event.element.cq = cq;
    event.public_event.event_type = type;
    event.counter = counter;
    events.push(event);
}

void Context::drop_events(const std::shared_ptr<EventCounter>& counter) {
    events.drop_if([&](const AsyncEvent& event) { return event.counter == counter; });
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

int ibv_get_async_event(ibv_context* public_context, ibv_async_event* event) {
    if (const auto fault = find_injected_fault("ibv_get_async_event")) {
        return fail_minus1(*fault);
    }
    Context* const context = get_context(public_context);
    if (!is_alive("ibv_context", context)) {
        return fail_minus1(EINVAL);
    }
    AsyncEvent first_event;
    const int error =
        context->events.take(&first_event, [](const AsyncEvent& taken_event) { taken_event.counter->count_taken(); });
    if (error != 0) {
        return fail_minus1(error);
    }
    *event = first_event.public_event;
    return 0;
}

void ibv_ack_async_event(ibv_async_event* event) {
    switch (event->event_type) {
    case IBV_EVENT_CQ_ERR:
        if (is_alive("ibv_cq", event->element.cq)) {
            acknowledge_async(event->element.cq);
        }
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        if (is_alive("ibv_qp", event->element.qp)) {
            acknowledge_async(event->element.qp);
        }
        break;
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        if (is_alive("ibv_srq", event->element.srq)) {
            acknowledge_async(event->element.srq);
        }
        break;
    default:
        // The twin raises no other events. Events without an object need no acknowledgement.
        break;
    }
}

} // extern "C"
