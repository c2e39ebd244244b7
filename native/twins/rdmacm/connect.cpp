// The exported functions of librdmacm that make, accept, reject and end connections.

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "rdmacm/connection.hpp"
#include "rdmacm/functions.hpp"
#include "rdmacm/ports.hpp"
#include "rdmacm/queue_pair.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

constexpr std::chrono::milliseconds listener_grace_time{1000}; // connect_or_wait says why
constexpr int max_backlog = 1024;                              // the kernel's default of net.rdma_ucm.max_backlog

std::uint8_t limit_to_device(std::uint8_t requested_number, std::uint8_t device_limit) {
    return std::min(requested_number, device_limit); // 255 requests the largest number
}

// Return 0, or EINVAL if the parameters exceed the limits of the device. If `parameters` is nullptr, return EINVAL
// unless the identifier has a queue pair: a program that creates its queue pair itself gives the number of the
// pair in the parameters.
int check_parameters(const Identifier& id, const rdma_conn_param* parameters) {
    if (is_datagram(id)) {
        return 0;
    }
    if (parameters == nullptr) {
        return id.public_id.qp == nullptr ? EINVAL : 0;
    }
    const bool has_too_many_resources = parameters->responder_resources != rdma_max_resp_res &&
                                        parameters->responder_resources > id.local_gid->device->max_responder_resources;
    const bool is_too_deep = parameters->initiator_depth != rdma_max_init_depth &&
                             parameters->initiator_depth > id.local_gid->device->max_initiator_depth;
    return has_too_many_resources || is_too_deep ? EINVAL : 0;
}

// Write the parameters of the connection into a message.
void add_parameters(const Identifier& id, const rdma_conn_param& parameters, wire::Message* message) {
    message->responder_resources =
        limit_to_device(parameters.responder_resources, id.local_gid->device->max_responder_resources);
    message->initiator_depth = limit_to_device(parameters.initiator_depth, id.local_gid->device->max_initiator_depth);
    message->flow_control = parameters.flow_control != 0;
    message->retry_count = std::min<std::uint8_t>(parameters.retry_count, 7); // the retry counts have three bits
    message->rnr_retry_count = std::min<std::uint8_t>(parameters.rnr_retry_count, 7);
    message->qp_num = (id.public_id.qp != nullptr ? id.public_id.qp->qp_num : parameters.qp_num) & 0xffffff;
    message->srq = id.public_id.qp != nullptr ? id.public_id.qp->srq != nullptr : parameters.srq != 0;
}

// Return the parameters for a program that gives none.
rdma_conn_param make_default_parameters() {
    rdma_conn_param parameters{};
    parameters.responder_resources = rdma_max_resp_res;
    parameters.initiator_depth = rdma_max_init_depth;
    parameters.flow_control = 1;
    parameters.retry_count = 7;
    parameters.rnr_retry_count = 7;
    return parameters;
}

// Queue the event of a failed attempt to connect to the listener. `error` is the errno of the attempt.
void report_unreachable(Identifier* id, int error) {
    int unused_error = 0;
    const auto& devices = get_cm_devices(&unused_error);
    const bool is_peer_on_this_host = std::any_of(devices.begin(), devices.end(), [&](const auto& device) {
        return std::any_of(device->gids.begin(), device->gids.end(),
                           [&](const ibv_gid_entry& entry) { return is_same_gid(entry.gid, id->remote_gid); });
    });
    if (error != ECONNREFUSED || !is_peer_on_this_host) {
        queue_event(id, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT); // as in the kernel if no connection manager replies
    } else if (is_datagram(*id)) {
        queue_event(id, RDMA_CM_EVENT_UNREACHABLE, datagram_unsupported);
    } else {
        queue_event(id, RDMA_CM_EVENT_REJECTED, rejected_no_listener);
    }
}

// Remember the destination if a listener was found there. Return whether this process has ever found a listener at the
// destination.
bool record_listener(const IpAddress& address, std::uint16_t port, bool was_found) {
    static std::mutex mutex;
    // The set is never destroyed, because threads of the program may connect while the process exits.
    static auto* const destinations = new std::set<std::pair<std::string, std::uint16_t>>();
    const auto* const address_bytes = reinterpret_cast<const char*>(address.bytes.raw);
    const std::pair destination(std::string(address_bytes, sizeof address.bytes.raw), port);
    std::lock_guard lock(mutex);
    if (was_found) {
        destinations->insert(destination);
    }
    return destinations->count(destination) != 0;
}

// Connect to the listener at a destination. Return the socket or -errno. If no process listens, fail at once, unless
// this process has found a listener at the destination before. Then wait up to listener_grace_time for a new listener.
// `perftest -R` needs this wait: the client and the server exchange parameters over a first connection, and the server
// listens at the same port again only after it has told the client to connect. On hardware the server is still early
// enough. With the twin it may be late, because the processor also does the work of the NIC.
int connect_or_wait(rdma_port_space port_space, const ibv_gid& gid, const IpAddress& address, std::uint16_t port) {
    const auto deadline = std::chrono::steady_clock::now() + listener_grace_time;
    for (;;) {
        const int socket_or_error = connect_to_listener(port_space, gid, address, port);
        const bool had_listener = record_listener(address, port, socket_or_error >= 0);
        if (socket_or_error != -ECONNREFUSED || !had_listener || std::chrono::steady_clock::now() >= deadline) {
            return socket_or_error;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

// Send the request of an identifier that is in the state connecting. An event reports a failure, so the function always
// returns 0.
int send_request(Identifier* id, const wire::Message& request) {
    ibv_gid gid{};
    std::copy(request.dst_gid.begin(), request.dst_gid.end(), gid.raw);
    IpAddress address;
    address.family = request.family;
    std::copy(request.dst_ip.begin(), request.dst_ip.end(), address.bytes.raw);
    const int socket_or_error = connect_or_wait(id->public_id.ps, gid, address, request.dst_port);
    Fd socket(socket_or_error);
    std::lock_guard lock(manager_mutex());
    if (!socket) {
        report_unreachable(id, -socket_or_error);
        return 0;
    }
    auto connection = std::make_shared<Connection>();
    connection->socket = std::move(socket);
    connection->id = id;
    id->connection = connection;
    send_message(connection.get(), request);
    start_reading(connection);
    return 0;
}

int connect_identifier(Identifier* id, const rdma_conn_param* program_parameters) {
    const rdma_conn_param parameters = program_parameters != nullptr ? *program_parameters : make_default_parameters();
    wire::Message request{};
    {
        std::lock_guard lock(manager_mutex());
        if (id->state != State::route_resolved) {
            return EINVAL;
        }
        if (const int error = check_parameters(*id, program_parameters); error != 0) {
            return error;
        }
        const void* private_data = parameters.private_data;
        std::size_t private_bytes = parameters.private_data == nullptr ? 0 : parameters.private_data_len;
        if (private_bytes == 0 && !id->connect_private_data.empty()) {
            private_data = id->connect_private_data.data(); // ai_connect of the entry that rdma_create_ep got
            private_bytes = id->connect_private_data.size();
        }
        const auto message = make_message(*id, is_datagram(*id) ? wire::Type::datagram_request : wire::Type::request,
                                          private_data, private_bytes);
        if (!message) {
            return EINVAL;
        }
        request = *message;
        add_parameters(*id, parameters, &request);
        id->responder_resources = request.responder_resources;
        id->initiator_depth = request.initiator_depth;
        id->retry_count = request.retry_count;
        id->rnr_retry_count = request.rnr_retry_count;
        id->state = State::connecting;
    }
    return send_request(id, request);
}

int listen_identifier(Identifier* id, int backlog) {
    std::lock_guard lock(manager_mutex());
    int error = id->state == State::idle ? bind_to_any(id, AF_INET) : 0;
    if (error == 0 && id->state != State::bound) {
        error = EINVAL;
    }
    error = error != 0 ? error : claim_exclusively(id);
    if (error != 0) {
        return error;
    }
    id->free_backlog = backlog > 0 && backlog < max_backlog ? backlog : max_backlog;
    error = open_listeners(id);
    id->state = error == 0 ? State::listening : id->state;
    return error;
}

// Reply to a request for datagrams (SIDR) with the number and the queue key of the program's queue pair.
int accept_datagram_request(Identifier* id, const rdma_conn_param* parameters) {
    const bool has_data = parameters != nullptr && parameters->private_data != nullptr;
    std::lock_guard lock(manager_mutex());
    auto reply = make_message(*id, wire::Type::datagram_reply, has_data ? parameters->private_data : nullptr,
                              has_data ? parameters->private_data_len : 0);
    if (!reply || id->connection == nullptr || id->connection->phase != Phase::received_request) {
        return EINVAL;
    }
    reply->qp_num =
        id->public_id.qp != nullptr ? id->public_id.qp->qp_num : (parameters == nullptr ? 0 : parameters->qp_num);
    reply->qkey = id->qkey;
    id->is_accepted = true;
    send_message(id->connection.get(), *reply);
    close_connection(id->connection.get());
    return 0;
}

int accept_identifier(Identifier* id, const rdma_conn_param* program_parameters) {
    {
        std::lock_guard lock(manager_mutex());
        if (id->state != State::connecting || !id->is_passive || id->is_accepted) {
            return EINVAL;
        }
    }
    if (is_datagram(*id)) {
        return accept_datagram_request(id, program_parameters);
    }
    // The passive side makes its queue pair ready and sends the reply. It is connected when the ready_to_use message of
    // the peer arrives (on_message in connection.cpp).
    if (const int error = check_parameters(*id, program_parameters); error != 0) {
        return error;
    }
    rdma_conn_param parameters = program_parameters != nullptr ? *program_parameters : make_default_parameters();
    // If the program requests the largest number (RDMA_MAX_RESP_RES, RDMA_MAX_INIT_DEPTH: both are 255), use the number
    // that the peer requested.
    const auto choose_limit = [](std::uint8_t own_limit, std::uint8_t peer_limit) {
        return own_limit == rdma_max_resp_res ? peer_limit : own_limit;
    };
    parameters.responder_resources = choose_limit(parameters.responder_resources, id->responder_resources);
    parameters.initiator_depth = choose_limit(parameters.initiator_depth, id->initiator_depth);
    if (const int error = make_queue_pair_ready(id, parameters.responder_resources, parameters.initiator_depth);
        error != 0) {
        return error;
    }
    std::lock_guard lock(manager_mutex());
    auto reply = make_message(*id, wire::Type::reply, parameters.private_data,
                              parameters.private_data == nullptr ? 0 : parameters.private_data_len);
    if (!reply || id->connection == nullptr || id->connection->phase != Phase::received_request) {
        return EINVAL;
    }
    add_parameters(*id, parameters, &*reply);
    reply->retry_count = 0; // the reply of the real protocol has no such field
    id->responder_resources = reply->responder_resources;
    id->initiator_depth = reply->initiator_depth;
    id->is_accepted = true;
    id->connection->phase = Phase::sent_reply;
    send_message(id->connection.get(), *reply);
    return 0;
}

int reject_identifier(Identifier* id, const void* private_data, std::uint8_t private_bytes) {
    std::lock_guard lock(manager_mutex());
    Connection* const connection = id->connection.get();
    if (connection == nullptr ||
        (connection->phase != Phase::received_request && connection->phase != Phase::received_reply)) {
        return EINVAL;
    }
    auto rejection = make_message(*id, is_datagram(*id) ? wire::Type::datagram_reply : wire::Type::reject, private_data,
                                  private_data == nullptr ? 0 : private_bytes);
    if (!rejection) {
        return EINVAL;
    }
    rejection->reason = static_cast<std::uint32_t>(is_datagram(*id) ? datagram_rejected : rejected_by_program);
    send_message(connection, *rejection);
    close_connection(connection);
    return 0;
}

} // namespace

extern "C" {

int rdma_connect(rdma_cm_id* id, rdma_conn_param* conn_param) {
    return run_entry_with_errno("rdma_connect", [&] {
        Identifier* const identifier = get_identifier(id);
        const int error = identifier == nullptr ? EINVAL : connect_identifier(identifier, conn_param);
        return error != 0 ? error : wait_if_synchronous(identifier);
    });
}

int rdma_listen(rdma_cm_id* id, int backlog) {
    return run_entry_with_errno("rdma_listen", [&] {
        Identifier* const identifier = get_identifier(id);
        return identifier == nullptr ? EINVAL : listen_identifier(identifier, backlog);
    });
}

int rdma_accept(rdma_cm_id* id, rdma_conn_param* conn_param) {
    return run_entry_with_errno("rdma_accept", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr) {
            return EINVAL;
        }
        if (const int error = accept_identifier(identifier, conn_param); error != 0) {
            fail_queue_pair(identifier);
            return error;
        }
        return is_datagram(*identifier) ? 0 : wait_if_synchronous(identifier);
    });
}

int rdma_reject(rdma_cm_id* id, const void* private_data, std::uint8_t private_data_len) {
    return run_entry_with_errno("rdma_reject", [&] {
        Identifier* const identifier = get_identifier(id);
        return identifier == nullptr ? EINVAL : reject_identifier(identifier, private_data, private_data_len);
    });
}

int rdma_reject_ece(rdma_cm_id* id, const void* private_data, std::uint8_t private_data_len) {
    return run_entry_with_errno("rdma_reject_ece", [&] {
        Identifier* const identifier = get_identifier(id);
        return identifier == nullptr ? EINVAL : reject_identifier(identifier, private_data, private_data_len);
    });
}

int rdma_establish(rdma_cm_id* id) {
    return run_entry_with_errno("rdma_establish", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr || id->qp != nullptr) { // with a queue pair, rdma_get_cm_event does this
            return EINVAL;
        }
        {
            std::lock_guard lock(manager_mutex());
            const Connection* const connection = identifier->connection.get();
            if (connection == nullptr || connection->phase != Phase::received_reply) {
                return EINVAL;
            }
        }
        return establish_active_side(identifier);
    });
}

int rdma_notify(rdma_cm_id* id, ibv_event_type event) {
    return run_entry_with_errno("rdma_notify", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr || event != IBV_EVENT_COMM_EST) {
            return EINVAL;
        }
        std::lock_guard lock(manager_mutex());
        Connection* const connection = identifier->connection.get();
        if (connection == nullptr ||
            (connection->phase != Phase::sent_reply && connection->phase != Phase::established)) {
            return EINVAL;
        }
        if (connection->phase == Phase::established) {
            return EISCONN; // as cm_establish in the kernel
        }
        connection->phase = Phase::established;
        queue_event(identifier, RDMA_CM_EVENT_ESTABLISHED);
        return 0;
    });
}

int rdma_disconnect(rdma_cm_id* id) {
    return run_entry_with_errno("rdma_disconnect", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr) {
            return EINVAL;
        }
        fail_queue_pair(identifier);
        {
            std::lock_guard lock(manager_mutex());
            if (!disconnect(identifier)) {
                return EINVAL;
            }
        }
        return wait_if_synchronous(identifier);
    });
}

// With enhanced connection establishment (ECE), the two sides negotiate vendor options. The twin has no such options,
// so it ignores the options of the program and reports empty options.
int rdma_set_local_ece(rdma_cm_id* id, ibv_ece* ece) {
    return run_entry_with_errno("rdma_set_local_ece",
                                [&] { return get_identifier(id) == nullptr || ece == nullptr ? EINVAL : 0; });
}

int rdma_get_remote_ece(rdma_cm_id* id, ibv_ece* ece) {
    return run_entry_with_errno("rdma_get_remote_ece", [&] {
        if (get_identifier(id) == nullptr || ece == nullptr) {
            return EINVAL;
        }
        *ece = {};
        return 0;
    });
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
