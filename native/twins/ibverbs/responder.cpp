// The threads of a queue pair that accept connections of peers (acceptor) and serve the requests of the peers
// (responders). A responder checks key, bounds, permission and queue pair state for every chunk. A parameter of the
// type Lock shows that the caller holds mutex_.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "ibverbs/connected_queue_pair.hpp"
#include "ibverbs/tcp_link.hpp"
#include "model/config.hpp"
#include "model/fabric.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A queue pair needs one connection, from its peer. Further connections may be attempts that the peer made before
// this side was ready, or come from untrusted clients.
constexpr std::size_t max_connections = 16;

// Return the type of a queue pair that sends to a queue pair of the given type.
ibv_qp_type get_peer_type(ibv_qp_type type) {
    switch (type) {
    case IBV_QPT_XRC_RECV:
        return IBV_QPT_XRC_SEND;
    case IBV_QPT_XRC_SEND:
        // No queue pair sends to this type, so return a type that sends nothing.
        return IBV_QPT_XRC_RECV;
    default:
        return type;
    }
}

// Return whether the connection ends after a response with this status. After receiver_not_ready the requester may send
// the request again. Any other failure ends the connection.
bool ends_connection(wire::Status status) {
    return status != wire::Status::done && status != wire::Status::receiver_not_ready;
}

} // namespace

void ConnectedQueuePair::run_acceptor(int listener, bool is_remote) {
    for (;;) {
        Fd socket(accept_from(listener));
        Lock lock(mutex_);
        if (is_closing_) {
            return;
        }
        join_ended_connections(lock);
        if (!socket) {
            // No descriptors or memory are left. Wait 10 ms: a connection that ends may free some.
            state_changed_.wait_for(lock, std::chrono::milliseconds(10), [this] { return is_closing_; });
            continue;
        }
        if (!is_remote && !is_same_user(socket.get())) {
            continue;
        }
        if (connections_.size() >= max_connections) {
            evict_silent_connection(lock);
            continue;
        }
        Connection& connection = connections_.emplace_back();
        connection.socket = std::move(socket);
        connection.is_remote = is_remote;
        try {
            connection.thread = start_signal_blocking_thread([this, &connection] { run_responder(&connection); });
        } catch (const std::system_error&) {
            // The thread cannot be created. The peer sees the end of file and tries again.
            connections_.pop_back();
        }
    }
}

void ConnectedQueuePair::join_ended_connections(const Lock&) {
    for (auto connection = connections_.begin(); connection != connections_.end();) {
        if (connection->has_ended) {
            connection->thread.join();
            connection = connections_.erase(connection);
        } else {
            ++connection;
        }
    }
}

// End the oldest connection that has not completed its handshake, to make room for the peer's next attempt.
void ConnectedQueuePair::evict_silent_connection(const Lock&) {
    const auto silent_connection =
        std::find_if(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return !connection.is_serving && connection.socket; });
    if (silent_connection != connections_.end()) {
        shutdown(silent_connection->socket.get(), SHUT_RDWR);
    }
}

void ConnectedQueuePair::run_responder(Connection* connection) {
    if (const auto link = accept_handshake(connection)) {
        IncomingMessage incoming;
        serve_requests(connection, link.get(), &incoming);
        return_receive(&incoming, *connection);
        close_grants(*connection);
    }
    Lock lock(mutex_);
    connection->socket.reset();
    connection->is_serving = false;
    connection->has_ended = true;
    notify_change(lock);
}

// Receive the connect request and the descriptors of the link, and reply. Return the link, or nullptr if this pair does
// not accept the peer.
std::unique_ptr<Link> ConnectedQueuePair::accept_handshake(Connection* connection) {
    const int socket = connection->socket.get();
    wire::ConnectRequest connect_request{};
    std::vector<Fd> shared_fds;
    if ((connection->is_remote && !authenticate_client(socket)) ||
        !recv_all(socket, &connect_request, sizeof connect_request) || !wire::is_well_formed(connect_request) ||
        (!connection->is_remote && !recv_fds(socket, Link::fd_count, &shared_fds))) {
        return nullptr;
    }
    auto link = connection->is_remote ? TcpLink::make_responder() : Link::adopt(std::move(shared_fds));
    if (link == nullptr) {
        return nullptr;
    }
    static const std::uint64_t probe_value = random_u64();
    // The reply refuses the peer (0) until the checks below have passed.
    wire::ConnectReply reply{
        wire::magic, 0, reinterpret_cast<std::uint64_t>(&probe_value), probe_value, context_->device->index, 0};
    // Grants let the process of the peer copy directly to and from regions (grants.hpp).
    auto grants = connection->is_remote || xrc_domain_ != nullptr
                      ? nullptr
                      : GrantIssuer::make(&link->grants(), get_peer_process_id(socket), context_->device);
    {
        Lock lock(mutex_);
        if (can_receive_requests() && is_expected_peer(lock, connect_request) && !is_closing_) {
            reply.is_accepted = 1;
            connection->is_serving = true;
            connection->generation = generation_;
            connection->grants = std::move(grants);
        }
    }
    if (!send_all(socket, &reply, sizeof reply) || reply.is_accepted != 1) {
        close_grants(*connection); // before the link, whose memory has the grants, is destroyed
        return nullptr;
    }
    return link;
}

bool ConnectedQueuePair::is_expected_peer(const Lock&, const wire::ConnectRequest& connect_request) const {
    const ibv_global_route& route = attr_.ah_attr.grh;
    return connect_request.destination_qpn == qp_num_ && connect_request.source_qpn == attr_.dest_qp_num &&
           std::memcmp(&connect_request.source_gid, &route.dgid, sizeof route.dgid) == 0 &&
           std::memcmp(&connect_request.destination_gid, &context_->device->gid, sizeof(ibv_gid)) == 0 &&
           // An unreliable pair accepts any packet sequence number in the first packet of a message.
           (connect_request.psn == attr_.rq_psn || !is_reliable()) &&
           connect_request.gid_type == static_cast<std::uint32_t>(get_gid_type(route.sgid_index)) &&
           connect_request.qp_type == static_cast<std::uint32_t>(get_peer_type(type()));
}

// Serve the requests of a connection until it ends.
void ConnectedQueuePair::serve_requests(Connection* connection, Link* link, IncomingMessage* incoming) {
    for (std::uint32_t served_count = 0; link->wait_for_request(served_count, connection->socket.get());) {
        const std::uint32_t request_count = link->request_count();
        if (request_count - served_count > Link::slot_count) {
            // A peer that claims more requests than the ring can hold violates the protocol.
            return;
        }
        while (served_count != request_count) {
            if (link->has_ended()) {
                return;
            }
            // The batch is empty if the next request must be served alone.
            const auto batch_count = serve_write_batch(connection, link, served_count, request_count, *incoming);
            if (!batch_count || (*batch_count == 0 && !serve_request(connection, link, served_count, incoming))) {
                return;
            }
            served_count += std::max(*batch_count, 1U);
        }
    }
}

// Serve one request and publish its response. Return false if the connection must end, because the peer violates the
// protocol, the pair cannot serve requests now, or the request has failed.
bool ConnectedQueuePair::serve_request(Connection* connection, Link* link, std::uint32_t request_number,
                                       IncomingMessage* incoming) {
    const wire::Request request = link->read_request(request_number);
    if (!wire::is_well_formed(request) || !Link::is_payload_in_bounds(request)) {
        return false;
    }
    // An unreliable connection (UC) supports only sends and writes, and their payload never uses the pipe.
    if (!is_reliable() && (!wire::carries_payload(request.opcode) || (request.flags & wire::flag_piped) != 0)) {
        return false;
    }
    // Each chunk of a send must continue where the previous chunk ended, and no other message may start before the send
    // is complete.
    if (incoming->is_active
            ? (request.opcode != wire::Opcode::send || request.chunk_offset_bytes != incoming->arrived_bytes ||
               request.message_bytes != incoming->message_bytes)
            : (request.opcode == wire::Opcode::send && request.chunk_offset_bytes != 0 && !incoming->is_dropped)) {
        return false;
    }
    if (!may_serve(*connection)) {
        return false;
    }
    wire::Response response = execute(request, link, incoming, *connection);
    if (response.magic != wire::magic) {
        // execute_write returns an empty response if the requester has stopped.
        return false;
    }
    if (response.status == wire::Status::done) {
        count_served(request);
    } else if (!is_reliable()) {
        drop_message(request, incoming, *connection);
        response = wire::make_response(wire::Status::done);
    }
    link->put_response(request_number, response);
    link->publish_responses(request_number + 1, connection->socket.get());
    // Publish the response before the completion, as hardware does. A program may end as soon as it has polled its last
    // receive completion, and then the peer must already have the response.
    if (incoming->completion) {
        deliver_receive(incoming, *connection);
    }
    return !ends_connection(response.status);
}

bool ConnectedQueuePair::may_serve(const Connection& connection) {
    Lock lock(mutex_);
    return !is_closing_ && can_receive_requests() && connection.generation == generation_;
}

wire::Response ConnectedQueuePair::execute(const wire::Request& request, Link* link, IncomingMessage* incoming,
                                           const Connection& connection) {
    if (!incoming->is_active) {
        incoming->shared_queue =
            xrc_domain_ != nullptr ? xrc_domain_->find_queue(request.srq_number) : shared_receive_queue_;
    }
    if (xrc_domain_ != nullptr && incoming->shared_queue == nullptr) {
        return fail_request(wire::Status::invalid_request, IBV_EVENT_QP_REQ_ERR, connection);
    }
    switch (request.opcode) {
    case wire::Opcode::send:
        return execute_send(request, link->memory(), incoming);
    case wire::Opcode::write:
        return execute_write(request, link, incoming, connection);
    case wire::Opcode::read:
        return execute_read(request, &link->memory(), *incoming, connection);
    default:
        return execute_atomic(request, *incoming, connection);
    }
}

// Return the domain in which the key of a request is valid. An XRC request uses the domain of its shared receive queue.
ProtectionDomain* ConnectedQueuePair::get_target_domain(const IncomingMessage& incoming) const {
    return xrc_domain_ != nullptr ? incoming.shared_queue->domain() : domain_;
}

bool ConnectedQueuePair::permits(unsigned required_access) {
    Lock lock(mutex_);
    return permits(lock, required_access);
}

bool ConnectedQueuePair::permits(const Lock&, unsigned required_access) const {
    const bool reads_memory = (required_access & (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
    return (attr_.qp_access_flags & required_access) == required_access &&
           (!reads_memory || attr_.max_dest_rd_atomic > 0);
}

// Copy the payload of a write to `address` in the region.
RegionError ConnectedQueuePair::write_payload(const wire::Request& request, std::uint64_t address, Region* region,
                                              Link* link) {
    if ((request.flags & wire::flag_piped) == 0) {
        return region->write(address, link->memory(), request.payload_offset, request.chunk_bytes);
    }
    if (region->is_mapped()) {
        return region->read_from_pipe(address, &link->pipe(), request.chunk_bytes);
    }
    BounceBuffer* const bounce = link->get_private_buffer();
    if (bounce == nullptr) {
        return RegionError::fault;
    }
    return link->pipe().read(bounce->data_at(0), request.chunk_bytes) == 0
               ? region->write(address, *bounce, 0, request.chunk_bytes)
               : RegionError::lost;
}

wire::Response ConnectedQueuePair::execute_write(const wire::Request& request, Link* link, IncomingMessage* incoming,
                                                 const Connection& connection) {
    if (!permits(IBV_ACCESS_REMOTE_WRITE)) {
        return fail_request(wire::Status::invalid_request, IBV_EVENT_QP_REQ_ERR, connection);
    }
    // The key of an empty message is not checked.
    std::shared_ptr<Region> region;
    std::uint64_t address = request.remote_address;
    if (request.message_bytes > 0) {
        region = find_by_rkey(request.rkey, get_target_domain(*incoming), qp_num_, IBV_ACCESS_REMOTE_WRITE, &address,
                              request.message_bytes);
        if (region == nullptr) {
            return fail_request(RegionError::refused, connection);
        }
    }
    const bool consumes_receive = (request.flags & wire::flag_immediate) != 0 && wire::is_last_chunk(request);
    if (consumes_receive && !consume_receive(incoming)) {
        return make_receiver_not_ready_response();
    }
    if (region != nullptr) {
        const RegionError error = write_payload(request, address + request.chunk_offset_bytes, region.get(), link);
        if (error == RegionError::lost) {
            // The requester has stopped and does not wait for a response. A response without the magic number makes
            // serve_request end the connection.
            return {};
        }
        if (error != RegionError::none) {
            return fail_request(error, connection);
        }
        grant(region.get(), request.rkey, connection);
    }
    return consumes_receive ? finish_receive(request, incoming) : wire::make_response(wire::Status::done);
}

wire::Response ConnectedQueuePair::execute_read(const wire::Request& request, BounceBuffer* bounce,
                                                const IncomingMessage& incoming, const Connection& connection) {
    if (!permits(IBV_ACCESS_REMOTE_READ)) {
        return fail_request(wire::Status::invalid_request, IBV_EVENT_QP_REQ_ERR, connection);
    }
    if (request.message_bytes > 0) {
        std::uint64_t address = request.remote_address;
        const auto region = find_by_rkey(request.rkey, get_target_domain(incoming), qp_num_, IBV_ACCESS_REMOTE_READ,
                                         &address, request.message_bytes);
        const RegionError error = region == nullptr ? RegionError::refused
                                                    : region->read(address + request.chunk_offset_bytes, bounce,
                                                                   request.payload_offset, request.chunk_bytes);
        if (error != RegionError::none) {
            return fail_request(error, connection);
        }
        grant(region.get(), request.rkey, connection);
    }
    wire::Response response = wire::make_response(wire::Status::done);
    response.payload_bytes = request.chunk_bytes;
    return response;
}

wire::Response ConnectedQueuePair::execute_atomic(const wire::Request& request, const IncomingMessage& incoming,
                                                  const Connection& connection) {
    if (!permits(IBV_ACCESS_REMOTE_ATOMIC) || request.remote_address % 8 != 0) {
        return fail_request(wire::Status::invalid_request, IBV_EVENT_QP_REQ_ERR, connection);
    }
    std::uint64_t address = request.remote_address;
    const auto region =
        find_by_rkey(request.rkey, get_target_domain(incoming), qp_num_, IBV_ACCESS_REMOTE_ATOMIC, &address, 8);
    wire::Response response = wire::make_response(wire::Status::done);
    const auto compute_new = [&](std::uint64_t original_value) {
        if (request.opcode == wire::Opcode::fetch_and_add) {
            return original_value + request.compare_or_add;
        }
        return original_value == request.compare_or_add ? request.swap : original_value;
    };
    const RegionError error = region == nullptr ? RegionError::refused
                                                : region->atomic_update(address, &response.original_value, compute_new);
    return error == RegionError::none ? response : fail_request(error, connection);
}

// Return the response that refuses a request. Before that, put a reliable pair in the error state and raise the event.
wire::Response ConnectedQueuePair::fail_request(wire::Status status, ibv_event_type event,
                                                const Connection& connection) {
    Lock lock(mutex_);
    // An unreliable pair drops a request that it refuses, and stays in its state.
    if (connection.generation == generation_ && is_reliable()) {
        fail(lock, event, &connection);
    }
    return wire::make_response(status);
}

wire::Response ConnectedQueuePair::fail_request(RegionError error, const Connection& connection) {
    return error == RegionError::refused
               ? fail_request(wire::Status::access_refused, IBV_EVENT_QP_ACCESS_ERR, connection)
               : fail_request(wire::Status::operation_failed, IBV_EVENT_QP_FATAL, connection);
}

void ConnectedQueuePair::count_served(const wire::Request& request) {
    Traffic::Direction& served_traffic = context_->device->traffic.served;
    if (wire::is_last_chunk(request)) {
        ++served_traffic.requests;
    }
    switch (request.opcode) {
    case wire::Opcode::send:
        served_traffic.send_bytes += request.chunk_bytes;
        break;
    case wire::Opcode::write:
        served_traffic.write_bytes += request.chunk_bytes;
        break;
    case wire::Opcode::read:
        served_traffic.read_bytes += request.chunk_bytes;
        break;
    case wire::Opcode::compare_and_swap:
    case wire::Opcode::fetch_and_add:
        served_traffic.atomic_bytes += request.chunk_bytes;
        break;
    }
}

} // namespace gdrkit::twin::verbs
