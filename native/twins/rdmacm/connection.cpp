// Sends and receives the messages between connection managers, queues the events that the messages cause, and ends
// connections.

#include "rdmacm/connection.hpp"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "model/ledger.hpp"
#include "rdmacm/functions.hpp"
#include "rdmacm/ports.hpp"
#include "rdmacm/queue_pair.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// The connection of a peer that sends no request is closed after this time.
constexpr std::chrono::seconds request_timeout{10};
// The active side waits at most this time for the reply to its request. The kernel waits about as long, because the
// connection manager of the passive side asks for more time (MRA message).
constexpr std::chrono::seconds reply_timeout{70};
// If the peer does not reply to a disconnect request within this time, the connection ends without the reply.
constexpr std::chrono::seconds disconnect_timeout{20};
// Time between the end of a connection and RDMA_CM_EVENT_TIMEWAIT_EXIT. It is twice the packet life time that the
// kernel assumes for Ethernet: 2 * 4.096 us * 2^16 (CMA_IBOE_PACKET_LIFETIME is 16).
constexpr std::chrono::milliseconds timewait_duration{537};

// Replace the timer of the connection. The timer does not keep the connection alive.
void set_timer(Connection* connection, std::chrono::milliseconds delay, void (*on_expiry)(Connection*)) {
    cancel_timer(connection->timer_token);
    connection->timer_token = start_timer(delay, [weak_connection = connection->weak_from_this(), on_expiry] {
        if (const auto expired_connection = weak_connection.lock()) {
            expired_connection->timer_token = 0;
            on_expiry(expired_connection.get());
        }
    });
}

// Queue an event for the program, unless the identifier of the connection is destroyed or belongs to a request that the
// program has not accepted yet.
void report_to_program(Connection* connection, QueuedEvent event) {
    Identifier* const id = connection->id;
    if (id != nullptr && (!id->is_passive || id->is_accepted)) {
        queue_event(id, event);
    }
}

void report_to_program(Connection* connection, rdma_cm_event_type type, int status = 0) {
    QueuedEvent event;
    event.type = type;
    event.status = status;
    report_to_program(connection, event);
}

// Return an event with the parameters and the private data of a message. As in the kernel, the private data has the
// full size of its field and is padded with zeros.
QueuedEvent make_event(rdma_cm_event_type type, const wire::Message& message) {
    QueuedEvent event;
    event.type = type;
    std::copy(message.private_data.begin(), message.private_data.end(), event.private_data.begin());
    event.private_bytes = static_cast<std::uint8_t>(wire::get_private_field_bytes(message.type));
    // This side responds to the requests that the peer initiates, so the two numbers change places.
    event.conn.responder_resources = message.initiator_depth;
    event.conn.initiator_depth = message.responder_resources;
    event.conn.flow_control = message.flow_control;
    event.conn.retry_count = message.retry_count;
    event.conn.rnr_retry_count = message.rnr_retry_count;
    event.conn.srq = message.srq;
    event.conn.qp_num = message.qp_num;
    return event;
}

// Stop reading messages. After timewait_duration, report RDMA_CM_EVENT_TIMEWAIT_EXIT and close the connection.
void enter_timewait(Connection* connection) {
    connection->phase = Phase::ended;
    unwatch(connection->watch_token);
    connection->watch_token = 0;
    set_timer(connection, timewait_duration, [](Connection* expired_connection) {
        report_to_program(expired_connection, RDMA_CM_EVENT_TIMEWAIT_EXIT);
        close_connection(expired_connection);
    });
}

// Report RDMA_CM_EVENT_DISCONNECTED, but only once. An identifier has the state `connecting` from its connection
// request to this report, also while it is connected.
void report_disconnected(Connection* connection, int status) {
    if (connection->id != nullptr && connection->id->state == State::connecting) {
        connection->id->state = State::disconnected;
        report_to_program(connection, RDMA_CM_EVENT_DISCONNECTED, status);
    }
}

// End a connection from which no valid message can come any more: either the socket is at its end of file, because the
// peer process ended or destroyed its identifier, or the peer sent a message that the protocol does not allow. Report
// the same events as the kernel. The kernel destroys the identifiers of a process that ends, which rejects their
// requests and disconnects their connections.
void on_end(Connection* connection) {
    switch (connection->phase) {
    case Phase::waits_for_reply:
        if (connection->id != nullptr && is_datagram(*connection->id)) {
            report_to_program(connection, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
        } else {
            report_to_program(connection, RDMA_CM_EVENT_REJECTED, rejected_by_program);
        }
        break;
    case Phase::sent_reply:
    case Phase::received_reply:
        report_to_program(connection, RDMA_CM_EVENT_REJECTED, rejected_by_program);
        break;
    case Phase::established:
    case Phase::sent_disconnect:
        report_disconnected(connection, 0);
        enter_timewait(connection);
        return;
    default:
        break;
    }
    close_connection(connection);
}

void on_reply_timeout(Connection* connection) {
    report_to_program(connection, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
    close_connection(connection);
}

// Return whether a listener accepts requests for `address`, which depends on the address that the listener is bound to.
bool accepts_address(const Identifier& listener, const IpAddress& address) {
    const IpAddress bound_address = get_ip(&listener.public_id.route.addr.src_addr);
    return bound_address == address ||
           (bound_address.is_any() &&
            (bound_address.family == address.family || (bound_address.family == AF_INET6 && !listener.ipv6_only)));
}

IpAddress make_address(std::uint16_t family, const std::array<std::uint8_t, 16>& bytes) {
    IpAddress address;
    address.family = family;
    std::memcpy(address.bytes.raw, bytes.data(), bytes.size());
    return address;
}

// Reject the request in connection->incoming_message, without the program, and close the connection.
void reject_request(Connection* connection, wire::Type type, std::uint32_t reason) {
    wire::Message message = connection->incoming_message;
    message.type = type;
    message.reason = reason;
    message.private_bytes = 0;
    message.private_data = {};
    send_message(connection, message);
    close_connection(connection);
}

// Make the identifier for a new connection, from the request of the peer. Return nullptr if this host does not have the
// requested address, or if the identifier cannot be made.
Identifier* make_identifier_for_request(const Identifier& listener, const wire::Message& request) {
    const IpAddress destination = make_address(request.family, request.dst_ip);
    const IpAddress source = make_address(request.family, request.src_ip);
    const auto local_gid = find_local_gid(destination);
    Identifier* id = nullptr;
    if (!local_gid || make_identifier(listener.public_id.channel, listener.public_id.context, listener.public_id.ps,
                                      listener.public_id.qp_type, &id) != 0) {
        return nullptr;
    }
    std::memcpy(id->remote_gid.raw, request.src_gid.data(), request.src_gid.size());
    set_local_gid(id, *local_gid);
    set_source_address(id, destination, request.dst_port);
    store_address(&id->public_id.route.addr.dst_storage, source, request.src_port);
    id->public_id.route.addr.addr.ibaddr.dgid = id->remote_gid;
    id->tos = listener.tos;
    id->is_passive = true;
    id->state = State::connecting;
    id->responder_resources = std::min(request.initiator_depth, local_gid->device->max_responder_resources);
    id->initiator_depth = std::min(request.responder_resources, local_gid->device->max_initiator_depth);
    id->retry_count = request.retry_count;
    id->rnr_retry_count = request.rnr_retry_count;
    id->remote_qp_num = request.qp_num;
    id->remote_psn = request.psn;
    resolve_route_now(id);
    return id;
}

// Reply to a request for datagrams with the queue pair number of the listener (automatic_qp_num), and report no event.
void answer_automatically(Connection* connection, const Identifier& listener) {
    wire::Message reply = connection->incoming_message;
    reply.type = wire::Type::datagram_reply;
    reply.qp_num = listener.automatic_qp_num;
    reply.qkey = listener.qkey;
    reply.private_bytes = 0;
    reply.private_data = {};
    send_message(connection, reply);
    close_connection(connection);
}

void on_request(Connection* connection, const wire::Message& request) {
    Identifier* const listener = connection->listener == nullptr ? nullptr : *connection->listener;
    const bool is_for_datagrams = request.type == wire::Type::datagram_request;
    const wire::Type reject_type = is_for_datagrams ? wire::Type::datagram_reply : wire::Type::reject;
    const int no_listener_reason = is_for_datagrams ? datagram_unsupported : rejected_no_listener;
    if (listener == nullptr || listener->public_id.ps != static_cast<rdma_port_space>(request.port_space) ||
        is_datagram(*listener) != is_for_datagrams || request.dst_port != listener->port_claim.port ||
        !accepts_address(*listener, make_address(request.family, request.dst_ip))) {
        reject_request(connection, reject_type, static_cast<std::uint32_t>(no_listener_reason));
        return;
    }
    if (listener->automatic_qp_num != 0) {
        answer_automatically(connection, *listener);
        return;
    }
    // If the backlog is full or no identifier can be made, reject the request, as the kernel does.
    Identifier* const id = listener->free_backlog > 0 ? make_identifier_for_request(*listener, request) : nullptr;
    if (id == nullptr) {
        const int reason = is_for_datagrams ? datagram_rejected : rejected_by_program;
        reject_request(connection, reject_type, static_cast<std::uint32_t>(reason));
        return;
    }
    --listener->free_backlog;
    cancel_timer(connection->timer_token);
    connection->phase = Phase::received_request;
    connection->listener = nullptr;
    connection->id = id;
    id->connection = connection->shared_from_this();
    QueuedEvent event = make_event(RDMA_CM_EVENT_CONNECT_REQUEST, request);
    // The program gets the numbers of the peer after the limits of the device were applied.
    event.conn.responder_resources = id->responder_resources;
    event.conn.initiator_depth = id->initiator_depth;
    event.is_datagram = is_for_datagrams;
    event.new_id = id;
    queue_event(listener, event);
}

void on_reply(Connection* connection, const wire::Message& reply) {
    Identifier* const id = connection->id;
    cancel_timer(connection->timer_token);
    connection->phase = Phase::received_reply;
    id->remote_qp_num = reply.qp_num;
    id->remote_psn = reply.psn;
    id->responder_resources = std::min(reply.initiator_depth, id->local_gid->device->max_responder_resources);
    id->initiator_depth = std::min(reply.responder_resources, id->local_gid->device->max_initiator_depth);
    id->rnr_retry_count = reply.rnr_retry_count;
    report_to_program(connection, make_event(RDMA_CM_EVENT_CONNECT_RESPONSE, reply));
}

void on_datagram_reply(Connection* connection, const wire::Message& reply) {
    Identifier* const id = connection->id;
    QueuedEvent event = make_event(RDMA_CM_EVENT_ESTABLISHED, reply);
    event.is_datagram = true;
    if (reply.reason != 0) { // as the kernel does, report a refused request as unreachable
        event.type = RDMA_CM_EVENT_UNREACHABLE;
        event.status = static_cast<int>(reply.reason);
    } else {
        event.ud.qp_num = reply.qp_num;
        event.ud.qkey = reply.qkey;
        event.ud.ah_attr = make_path_to_remote(*id);
    }
    report_to_program(connection, event);
    close_connection(connection);
}

void on_reject(Connection* connection, const wire::Message& rejection) {
    QueuedEvent event = make_event(RDMA_CM_EVENT_REJECTED, rejection);
    event.status = static_cast<int>(rejection.reason);
    report_to_program(connection, event);
    close_connection(connection);
}

// Act on a valid message. A message that does not fit the phase ends the connection.
void on_message(Connection* connection, const wire::Message& message) {
    const Phase phase = connection->phase;
    const bool can_be_disconnected = phase == Phase::established || phase == Phase::sent_reply ||
                                     phase == Phase::received_reply || phase == Phase::sent_disconnect;
    switch (message.type) {
    case wire::Type::request:
    case wire::Type::datagram_request:
        return phase == Phase::waits_for_request ? on_request(connection, message) : on_end(connection);
    case wire::Type::reply:
        return phase == Phase::waits_for_reply && !is_datagram(*connection->id) ? on_reply(connection, message)
                                                                                : on_end(connection);
    case wire::Type::datagram_reply:
        return phase == Phase::waits_for_reply && is_datagram(*connection->id) ? on_datagram_reply(connection, message)
                                                                               : on_end(connection);
    case wire::Type::ready_to_use:
        if (phase != Phase::sent_reply) {
            // rdma_notify may already have established the connection. The message then changes nothing.
            return phase == Phase::established ? void() : on_end(connection);
        }
        cancel_timer(connection->timer_token);
        connection->phase = Phase::established;
        return report_to_program(connection, RDMA_CM_EVENT_ESTABLISHED);
    case wire::Type::reject:
        return phase == Phase::waits_for_reply || phase == Phase::sent_reply ? on_reject(connection, message)
                                                                             : on_end(connection);
    case wire::Type::disconnect_request:
        if (!can_be_disconnected) {
            return on_end(connection);
        }
        connection->phase = Phase::received_disconnect;
        return report_disconnected(connection, 0);
    case wire::Type::disconnect_reply:
        if (phase != Phase::sent_disconnect) {
            return on_end(connection);
        }
        report_disconnected(connection, 0);
        return enter_timewait(connection);
    }
}

// Receive the messages that have arrived, and act on each complete message.
void on_readable(Connection* connection) {
    // If the connection is closed below, the callback of watch() is destroyed with its reference. The connection must
    // nevertheless exist until this function returns.
    const auto keep_alive = connection->shared_from_this();
    while (connection->socket) {
        auto* const unfilled_part = reinterpret_cast<char*>(&connection->incoming_message) + connection->incoming_bytes;
        const ssize_t received_bytes =
            recv(connection->socket.get(), unfilled_part,
                 sizeof connection->incoming_message - connection->incoming_bytes, MSG_DONTWAIT);
        if (received_bytes < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        }
        if (received_bytes <= 0) {
            return on_end(connection);
        }
        connection->incoming_bytes += static_cast<std::size_t>(received_bytes);
        if (connection->incoming_bytes < sizeof connection->incoming_message) {
            continue;
        }
        connection->incoming_bytes = 0;
        if (!wire::is_valid(connection->incoming_message)) {
            return on_end(connection);
        }
        const wire::Message message = connection->incoming_message;
        on_message(connection, message);
        if (connection->watch_token == 0) { // the message has ended the connection
            return;
        }
    }
}

// Accept the connections that wait at a listening socket of the identifier. Their requests arrive later.
void accept_connections(Identifier* listener, int listening_fd) {
    for (;;) {
        Fd socket(accept_from(listening_fd));
        if (!socket) {
            return;
        }
        if (!is_same_user(socket.get())) {
            continue; // the destructor of `socket` closes the connection
        }
        auto connection = std::make_shared<Connection>();
        connection->socket = std::move(socket);
        connection->listener = listener->pointer_to_self;
        connection->phase = Phase::waits_for_request;
        start_reading(connection);
        set_timer(connection.get(), request_timeout,
                  [](Connection* silent_connection) { close_connection(silent_connection); });
    }
}

} // namespace

void start_reading(const std::shared_ptr<Connection>& connection) {
    connection->watch_token = watch(connection->socket.get(), [connection] { on_readable(connection.get()); });
    if (connection->phase == Phase::waits_for_reply) {
        set_timer(connection.get(), reply_timeout, on_reply_timeout);
    }
}

void close_connection(Connection* connection) {
    const auto keep_alive = connection->shared_from_this();
    cancel_timer(connection->timer_token);
    unwatch(connection->watch_token);
    connection->timer_token = connection->watch_token = 0;
    connection->phase = Phase::ended;
    connection->socket.reset();
}

void send_message(Connection* connection, const wire::Message& message) {
    // A peer that reads nothing must not block the thread of the manager. The buffer of the socket has space for a few
    // messages, so a send that would block means that the peer does not read.
    if (connection->socket && send(connection->socket.get(), &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL) !=
                                  static_cast<ssize_t>(sizeof message)) {
        shutdown(connection->socket.get(), SHUT_RDWR);
    }
}

std::optional<wire::Message> make_message(const Identifier& id, wire::Type type, const void* private_data,
                                          std::size_t private_bytes) {
    if (private_bytes > wire::get_private_field_bytes(type)) {
        return std::nullopt;
    }
    wire::Message message{};
    message.magic = wire::magic;
    message.version = wire::version;
    message.type = type;
    message.port_space = id.public_id.ps;
    message.psn = id.psn;
    const IpAddress source = get_ip(&id.public_id.route.addr.src_addr);
    const IpAddress destination = get_ip(&id.public_id.route.addr.dst_addr);
    message.family = static_cast<std::uint16_t>(source.family);
    message.src_port = get_port(&id.public_id.route.addr.src_addr);
    message.dst_port = get_port(&id.public_id.route.addr.dst_addr);
    message.qp_type = static_cast<std::uint8_t>(id.public_id.qp_type);
    std::memcpy(message.src_ip.data(), source.bytes.raw, message.src_ip.size());
    std::memcpy(message.dst_ip.data(), destination.bytes.raw, message.dst_ip.size());
    std::memcpy(message.src_gid.data(), id.local_gid->gid().raw, message.src_gid.size());
    std::memcpy(message.dst_gid.data(), id.remote_gid.raw, message.dst_gid.size());
    message.private_bytes = static_cast<std::uint8_t>(private_bytes);
    if (private_bytes != 0) {
        std::memcpy(message.private_data.data(), private_data, private_bytes);
    }
    return message;
}

bool disconnect(Identifier* id) {
    Connection* const connection = id->connection.get();
    if (connection == nullptr || is_datagram(*id)) {
        return false;
    }
    switch (connection->phase) {
    case Phase::sent_reply:
    case Phase::received_reply:
    case Phase::established:
        send_message(connection, *make_message(*id, wire::Type::disconnect_request));
        connection->phase = Phase::sent_disconnect;
        set_timer(connection, disconnect_timeout, [](Connection* expired_connection) {
            report_disconnected(expired_connection, -ETIMEDOUT);
            enter_timewait(expired_connection);
        });
        return true;
    case Phase::received_disconnect:
        send_message(connection, *make_message(*id, wire::Type::disconnect_reply));
        enter_timewait(connection);
        return true;
    default:
        // As in the kernel, the disconnection of an ended connection succeeds.
        return connection->phase == Phase::ended || connection->phase == Phase::sent_disconnect;
    }
}

void close_identifier(Identifier* id) {
    *id->pointer_to_self = nullptr; // a connection that still waits for a request now has no listener
    for (auto& [socket, token] : id->listening_sockets) {
        unwatch(token);
    }
    id->listening_sockets.clear();
    id->port_claim = {};
    const auto connection = std::exchange(id->connection, nullptr);
    if (connection == nullptr) {
        return;
    }
    connection->id = nullptr;
    const wire::Type reject_type = is_datagram(*id) ? wire::Type::datagram_reply : wire::Type::reject;
    if (connection->phase == Phase::received_request || connection->phase == Phase::received_reply) {
        auto message = make_message(*id, reject_type);
        message->reason = static_cast<std::uint32_t>(is_datagram(*id) ? datagram_rejected : rejected_by_program);
        send_message(connection.get(), *message);
    } else if (connection->phase == Phase::sent_reply || connection->phase == Phase::established) {
        send_message(connection.get(), *make_message(*id, wire::Type::disconnect_request));
    } else if (connection->phase == Phase::received_disconnect) {
        send_message(connection.get(), *make_message(*id, wire::Type::disconnect_reply));
    }
    close_connection(connection.get());
}

int open_listeners(Identifier* id) {
    for (const std::string& name : list_listener_names(*id)) {
        Fd socket(listen_on(name));
        if (!socket) {
            return EADDRINUSE;
        }
        const int listening_fd = socket.get();
        fcntl(listening_fd, F_SETFL, fcntl(listening_fd, F_GETFL) | O_NONBLOCK);
        const Token token = watch(listening_fd, [id, listening_fd] { accept_connections(id, listening_fd); });
        id->listening_sockets.emplace_back(std::move(socket), token);
    }
    return 0;
}

int connect_to_listener(rdma_port_space port_space, const ibv_gid& gid, const IpAddress& address, std::uint16_t port) {
    int socket_or_error = -ECONNREFUSED;
    for (const std::string& name : list_names_to_try(port_space, gid, address, port)) {
        socket_or_error = connect_to(name);
        if (socket_or_error != -ECONNREFUSED) {
            break;
        }
    }
    return socket_or_error;
}

} // namespace gdrkit::twin::rdmacm
