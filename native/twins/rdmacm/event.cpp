// Event channels, and the conversion of the connection manager's events to the program's events.

#include <cstring>

#include "model/ledger.hpp"
#include "rdmacm/connection.hpp"
#include "rdmacm/functions.hpp"
#include "rdmacm/multicast.hpp"
#include "rdmacm/queue_pair.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// An event for the program, with its private data, which exists until the program acknowledges the event.
struct ProgramEvent {
    rdma_cm_event public_event{}; // first, because programs hold pointers to it
    std::array<std::uint8_t, 256> private_data{};
    std::shared_ptr<verbs::EventCounter> event_counter;
};

void copy_parameters(const QueuedEvent& queued_event, ProgramEvent* event) {
    event->private_data = queued_event.private_data;
    const void* const private_data = queued_event.private_bytes == 0 ? nullptr : event->private_data.data();
    if (queued_event.is_datagram) {
        event->public_event.param.ud = queued_event.ud;
        event->public_event.param.ud.private_data = private_data;
        event->public_event.param.ud.private_data_len = queued_event.private_bytes;
        return;
    }
    event->public_event.param.conn = queued_event.conn;
    event->public_event.param.conn.private_data = private_data;
    event->public_event.param.conn.private_data_len = queued_event.private_bytes;
}

// Store the new identifier of a connection request, and the listener, in the event. Return false if the program must
// not see the event, because the new identifier cannot be made synchronous.
bool prepare_request(const QueuedEvent& queued_event, ProgramEvent* event) {
    Identifier* const listener = queued_event.id;
    event->public_event.id = &queued_event.new_id->public_id;
    event->public_event.listen_id = &listener->public_id;
    {
        std::lock_guard lock(manager_mutex());
        ++listener->free_backlog; // as in the kernel, a request leaves the backlog when the program takes it
    }
    // If the listener is synchronous, the new identifier becomes synchronous, too.
    if (listener->is_synchronous && rdma_migrate_id(event->public_event.id, nullptr) != 0) {
        rdma_destroy_id(event->public_event.id);
        return false;
    }
    return true;
}

// Attach the queue pair of the identifier to the group. On failure the event becomes RDMA_CM_EVENT_MULTICAST_ERROR. As
// in librdmacm, the event's private data pointer is the context that the program gave to rdma_join_multicast.
bool prepare_join(const QueuedEvent& queued_event, ProgramEvent* event) {
    void* context = nullptr;
    event->public_event.status = attach_to_group(queued_event.id, queued_event.group, &context);
    event->public_event.param.ud.private_data = context;
    if (event->public_event.status != 0) {
        event->public_event.event = RDMA_CM_EVENT_MULTICAST_ERROR;
    }
    return true;
}

// Fill in the program's event, and do what librdmacm does before it returns the event: for example, change the state of
// the queue pair. Return false if the program must not see the event.
bool prepare_event(const QueuedEvent& queued_event, ProgramEvent* event) {
    Identifier* const id = queued_event.id;
    event->public_event.event = queued_event.type;
    event->public_event.status = queued_event.status;
    event->public_event.id = &id->public_id;
    copy_parameters(queued_event, event);
    switch (queued_event.type) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        return prepare_request(queued_event, event);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
        if (id->public_id.qp == nullptr) {
            return true; // the program connects its queue pair itself and calls rdma_establish
        }
        event->public_event.status = establish_active_side(id);
        event->public_event.event =
            event->public_event.status == 0 ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_CONNECT_ERROR;
        id->has_connect_failed = event->public_event.status != 0;
        return true;
    case RDMA_CM_EVENT_REJECTED:
        if (id->has_connect_failed) {
            return false; // the program already got RDMA_CM_EVENT_CONNECT_ERROR
        }
        fail_queue_pair(id);
        return true;
    case RDMA_CM_EVENT_DISCONNECTED:
        return !id->has_connect_failed;
    case RDMA_CM_EVENT_MULTICAST_JOIN:
        return prepare_join(queued_event, event);
    default:
        return true;
    }
}

} // namespace

void queue_event(Identifier* id, QueuedEvent event) {
    event.id = id;
    event.event_counter = id->event_counter;
    id->channel->events.push(event);
}

void queue_event(Identifier* id, rdma_cm_event_type type, int status) {
    QueuedEvent event;
    event.type = type;
    event.status = status;
    queue_event(id, event);
}

int wait_if_synchronous(Identifier* id) {
    if (!id->is_synchronous) {
        return 0;
    }
    if (id->public_id.event != nullptr) {
        rdma_ack_cm_event(id->public_id.event);
        id->public_id.event = nullptr;
    }
    if (rdma_get_cm_event(id->public_id.channel, &id->public_id.event) != 0) {
        return errno;
    }
    const int status = id->public_id.event->status;
    if (status != 0 && id->public_id.event->event == RDMA_CM_EVENT_REJECTED) {
        return ECONNREFUSED;
    }
    return status < 0 ? -status : status;
}

extern "C" {

rdma_event_channel* rdma_create_event_channel(void) {
    auto channel = std::make_unique<Channel>();
    int error = find_injected_error("rdma_create_event_channel");
    error = error != 0 ? error : channel->events.open();
    if (error != 0) {
        errno = error;
        return nullptr;
    }
    channel->public_channel.fd = channel->events.fd();
    record_open_handle("rdma_event_channel", reinterpret_cast<std::uint64_t>(channel.get()));
    return &channel.release()->public_channel;
}

void rdma_destroy_event_channel(rdma_event_channel* channel) {
    Channel* const channel_object = get_channel(channel);
    if (channel_object != nullptr &&
        record_closed_handle("rdma_event_channel", reinterpret_cast<std::uint64_t>(channel_object))) {
        delete channel_object;
    }
}

int rdma_get_cm_event(rdma_event_channel* channel, rdma_cm_event** event) {
    return run_entry_with_errno("rdma_get_cm_event", [&] {
        Channel* const channel_object = get_channel(channel);
        if (channel_object == nullptr || event == nullptr) {
            return EINVAL;
        }
        for (;;) {
            auto program_event = std::make_unique<ProgramEvent>();
            QueuedEvent queued_event;
            const int error = channel_object->events.take(
                &queued_event, [](const QueuedEvent& taken_event) { taken_event.event_counter->count_taken(); });
            if (error != 0) {
                return error;
            }
            program_event->event_counter = queued_event.event_counter;
            if (prepare_event(queued_event, program_event.get())) {
                record_open_handle("rdma_cm_event", reinterpret_cast<std::uint64_t>(program_event.get()));
                *event = &program_event.release()->public_event;
                return 0;
            }
            // The program does not get this event, so it cannot acknowledge the event.
            queued_event.event_counter->acknowledge(1);
        }
    });
}

int rdma_ack_cm_event(rdma_cm_event* event) {
    return run_entry_with_errno("rdma_ack_cm_event", [&] {
        auto* const program_event = reinterpret_cast<ProgramEvent*>(event);
        if (program_event == nullptr ||
            !record_closed_handle("rdma_cm_event", reinterpret_cast<std::uint64_t>(program_event))) {
            return EINVAL;
        }
        // Keep a reference to the counter: after acknowledge(), a thread in rdma_destroy_id may free the identifier at
        // once.
        const auto event_counter = program_event->event_counter;
        delete program_event;
        event_counter->acknowledge(1);
        return 0;
    });
}

const char* rdma_event_str(rdma_cm_event_type event) {
    static constexpr const char* event_names[] = {
        "RDMA_CM_EVENT_ADDR_RESOLVED",  "RDMA_CM_EVENT_ADDR_ERROR",      "RDMA_CM_EVENT_ROUTE_RESOLVED",
        "RDMA_CM_EVENT_ROUTE_ERROR",    "RDMA_CM_EVENT_CONNECT_REQUEST", "RDMA_CM_EVENT_CONNECT_RESPONSE",
        "RDMA_CM_EVENT_CONNECT_ERROR",  "RDMA_CM_EVENT_UNREACHABLE",     "RDMA_CM_EVENT_REJECTED",
        "RDMA_CM_EVENT_ESTABLISHED",    "RDMA_CM_EVENT_DISCONNECTED",    "RDMA_CM_EVENT_DEVICE_REMOVAL",
        "RDMA_CM_EVENT_MULTICAST_JOIN", "RDMA_CM_EVENT_MULTICAST_ERROR", "RDMA_CM_EVENT_ADDR_CHANGE",
        "RDMA_CM_EVENT_TIMEWAIT_EXIT",
    };
    return event < std::size(event_names) ? event_names[event] : "UNKNOWN EVENT";
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
