// Creates, destroys and migrates identifiers.

#include "rdmacm/identifier.hpp"

#include <cstdlib>
#include <cstring>

#include "model/config.hpp"
#include "model/ledger.hpp"
#include "rdmacm/connection.hpp"
#include "rdmacm/functions.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// Return whether the object exists. If the program has released it before, record_closed_handle aborts the process. If
// there was never such an object, record_closed_handle returns false.
bool is_alive(std::string_view type_name, const void* object) {
    const auto handle = reinterpret_cast<std::uint64_t>(object);
    return object != nullptr && (ledger_holds(type_name, handle) || record_closed_handle(type_name, handle));
}

void drop_events(Identifier* id) {
    id->channel->events.drop_if([id](const QueuedEvent& event) { return event.id == id; });
}

// Destroy the identifiers of the requests that the program has not taken from the listener. Their peers get a
// rejection.
void destroy_unreported_requests(Identifier* listener) {
    std::vector<Identifier*> new_ids;
    listener->channel->events.drop_if([&](const QueuedEvent& event) {
        if (event.id == listener && event.new_id != nullptr) {
            new_ids.push_back(event.new_id);
        }
        return event.id == listener;
    });
    for (Identifier* new_id : new_ids) {
        close_identifier(new_id);
        if (new_id->pd_device != nullptr) {
            release_default_pd(new_id->pd_device);
        }
        if (record_closed_handle("rdma_cm_id", reinterpret_cast<std::uint64_t>(new_id))) {
            delete new_id;
        }
    }
}

} // namespace

Identifier* get_identifier(rdma_cm_id* id) {
    auto* const identifier = reinterpret_cast<Identifier*>(id);
    return is_alive("rdma_cm_id", identifier) ? identifier : nullptr;
}

Channel* get_channel(rdma_event_channel* channel) {
    auto* const channel_object = reinterpret_cast<Channel*>(channel);
    return is_alive("rdma_event_channel", channel_object) ? channel_object : nullptr;
}

bool is_datagram(const Identifier& id) {
    return id.public_id.qp_type == IBV_QPT_UD;
}

int make_identifier(rdma_event_channel* channel, void* context, rdma_port_space port_space, ibv_qp_type qp_type,
                    Identifier** id) {
    auto identifier = std::make_unique<Identifier>();
    identifier->is_synchronous = channel == nullptr;
    rdma_event_channel* const event_channel = channel != nullptr ? channel : rdma_create_event_channel();
    if (event_channel == nullptr) {
        return errno;
    }
    identifier->channel = reinterpret_cast<Channel*>(event_channel);
    identifier->public_id.channel = event_channel;
    identifier->public_id.context = context;
    identifier->public_id.ps = port_space;
    identifier->public_id.qp_type = qp_type;
    identifier->psn = static_cast<std::uint32_t>(random_u64() & 0xffffff);
    identifier->qkey = udp_qkey;
    record_open_handle("rdma_cm_id", reinterpret_cast<std::uint64_t>(identifier.get()));
    *id = identifier.release();
    return 0;
}

void set_local_gid(Identifier* id, const LocalGid& local_gid) {
    id->local_gid = local_gid;
    id->public_id.verbs = local_gid.device->verbs;
    id->public_id.port_num = 1; // the only port of a device
    if (id->public_id.pd == nullptr) {
        // The real library sets the protection domain as soon as it knows the device.
        id->public_id.pd = take_default_pd(local_gid.device);
        id->pd_device = id->public_id.pd == nullptr ? nullptr : local_gid.device;
    }
    id->public_id.route.addr.addr.ibaddr.sgid = local_gid.gid();
    id->public_id.route.addr.addr.ibaddr.pkey = 0xffff; // the default partition key
}

void set_source_address(Identifier* id, const IpAddress& address, std::uint16_t port) {
    store_address(&id->public_id.route.addr.src_storage, address, port);
}

extern "C" {

int rdma_create_id(rdma_event_channel* channel, rdma_cm_id** id, void* context, rdma_port_space ps) {
    return run_entry_with_errno("rdma_create_id", [&] {
        if (ps != RDMA_PS_TCP && ps != RDMA_PS_UDP && ps != RDMA_PS_IB && ps != RDMA_PS_IPOIB) {
            return EINVAL;
        }
        if (channel != nullptr && get_channel(channel) == nullptr) {
            return EBADF;
        }
        int error = 0;
        {
            std::lock_guard lock(manager_mutex());
            get_cm_devices(&error);
        }
        Identifier* identifier = nullptr;
        const ibv_qp_type qp_type = ps == RDMA_PS_UDP || ps == RDMA_PS_IPOIB ? IBV_QPT_UD : IBV_QPT_RC;
        error = error != 0 ? error : make_identifier(channel, context, ps, qp_type, &identifier);
        if (error == 0) {
            *id = &identifier->public_id;
        }
        return error;
    });
}

int rdma_destroy_id(rdma_cm_id* id) {
    return run_entry_with_errno("rdma_destroy_id", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr) {
            return EINVAL;
        }
        {
            std::lock_guard lock(manager_mutex());
            close_identifier(identifier);
            destroy_unreported_requests(identifier);
            drop_events(identifier);
        }
        if (id->event != nullptr) {
            rdma_ack_cm_event(id->event);
            id->event = nullptr;
        }
        // As in librdmacm, wait until the program has acknowledged the events that it took.
        identifier->event_counter->wait_until_acknowledged();
        if (!record_closed_handle("rdma_cm_id", reinterpret_cast<std::uint64_t>(identifier))) {
            return EINVAL;
        }
        if (identifier->pd_device != nullptr) {
            std::lock_guard lock(manager_mutex());
            release_default_pd(identifier->pd_device);
        }
        if (identifier->is_synchronous) {
            rdma_destroy_event_channel(id->channel);
        }
        delete identifier;
        return 0;
    });
}

int rdma_migrate_id(rdma_cm_id* id, rdma_event_channel* channel) {
    return run_entry_with_errno("rdma_migrate_id", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr || (identifier->is_synchronous && channel == nullptr)) {
            return EINVAL;
        }
        const bool will_be_synchronous = channel == nullptr;
        rdma_event_channel* const new_channel = will_be_synchronous ? rdma_create_event_channel() : channel;
        if (new_channel == nullptr) {
            return errno;
        }
        if (get_channel(new_channel) == nullptr) {
            return EBADF;
        }
        rdma_event_channel* const old_channel = id->channel;
        {
            // Queued events move to the new channel, as in the kernel.
            std::lock_guard lock(manager_mutex());
            auto* const new_channel_object = reinterpret_cast<Channel*>(new_channel);
            std::vector<QueuedEvent> moved_events;
            identifier->channel->events.drop_if([&](const QueuedEvent& event) {
                if (event.id == identifier) {
                    moved_events.push_back(event);
                }
                return event.id == identifier;
            });
            for (const QueuedEvent& event : moved_events) {
                new_channel_object->events.push(event);
            }
            identifier->channel = new_channel_object;
        }
        if (identifier->is_synchronous && id->event != nullptr) {
            rdma_ack_cm_event(id->event);
            id->event = nullptr;
        }
        // Wait until the program has acknowledged the events that it took from the old channel.
        identifier->event_counter->wait_until_acknowledged();
        id->channel = new_channel;
        if (identifier->is_synchronous) {
            rdma_destroy_event_channel(old_channel);
        }
        identifier->is_synchronous = will_be_synchronous;
        return 0;
    });
}

__be16 rdma_get_src_port(rdma_cm_id* id) {
    return get_address_length(&id->route.addr.src_addr) == 0 ? 0 : htons(get_port(&id->route.addr.src_addr));
}

__be16 rdma_get_dst_port(rdma_cm_id* id) {
    return get_address_length(&id->route.addr.dst_addr) == 0 ? 0 : htons(get_port(&id->route.addr.dst_addr));
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
