// The threads of a queue pair that accept connections of peers and serve their requests. The responder checks key,
// bounds, permission and queue pair state for every chunk.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "ibverbs/queue_pair.hpp"
#include "model/config.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A peer needs one connection. The other places are for peers that tried before this side was ready, and for foreign
// clients.
constexpr std::size_t max_connections = 16;

bool ends_connection(wire::Status status) {
    return status != wire::Status::done && status != wire::Status::receiver_not_ready;
}

} // namespace

void QueuePair::run_acceptor() {
    for (;;) {
        Fd socket(accept_from(listener_.get()));
        Lock lock(mutex_);
        if (closing_) {
            return;
        }
        join_ended_connections(lock);
        if (!socket) {
            // Out of descriptors or memory. A connection that ends may free some.
            changed_.wait_for(lock, std::chrono::milliseconds(10), [this] { return closing_; });
            continue;
        }
        if (!is_same_user(socket.get())) {
            continue;
        }
        if (connections_.size() >= max_connections) {
            evict_silent_connection(lock);
            continue;
        }
        Connection& connection = connections_.emplace_back();
        connection.socket = std::move(socket);
        try {
            connection.thread = start_signal_blocking_thread([this, &connection] { run_responder(&connection); });
        } catch (const std::system_error&) {
            // The thread cannot be created. The peer sees the end of file and tries again.
            connections_.pop_back();
        }
    }
}

void QueuePair::join_ended_connections(const Lock&) {
    for (auto connection = connections_.begin(); connection != connections_.end();) {
        if (connection->ended) {
            connection->thread.join();
            connection = connections_.erase(connection);
        } else {
            ++connection;
        }
    }
}

// End the oldest connection that has not completed its handshake. The peer for which there was no place tries again.
void QueuePair::evict_silent_connection(const Lock&) {
    const auto silent_connection =
        std::find_if(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return !connection.serving && connection.socket; });
    if (silent_connection != connections_.end()) {
        shutdown(silent_connection->socket.get(), SHUT_RDWR);
    }
}

void QueuePair::run_responder(Connection* connection) {
    if (const auto link = accept_handshake(connection)) {
        IncomingMessage incoming;
        serve_requests(connection, link.get(), &incoming);
        return_receive(&incoming, *connection);
    }
    Lock lock(mutex_);
    connection->socket.reset();
    connection->serving = false;
    connection->ended = true;
    notify_change(lock);
}

std::unique_ptr<Link> QueuePair::accept_handshake(Connection* connection) {
    const int socket = connection->socket.get();
    wire::ConnectRequest connect_request{};
    std::vector<Fd> shared;
    if (!recv_all(socket, &connect_request, sizeof connect_request) || !wire::well_formed(connect_request) ||
        !recv_fds(socket, Link::fd_count, &shared)) {
        return nullptr;
    }
    auto link = Link::adopt(std::move(shared));
    if (link == nullptr) {
        return nullptr;
    }
    wire::ConnectReply reply{wire::magic, 0};
    {
        Lock lock(mutex_);
        const ibv_global_route& route = attr_.ah_attr.grh;
        const bool expected =
            connect_request.destination_qpn == number_ && connect_request.source_qpn == attr_.dest_qp_num &&
            std::memcmp(&connect_request.source_gid, &route.dgid, sizeof route.dgid) == 0 &&
            std::memcmp(&connect_request.destination_gid, &context_->device->gid, sizeof(ibv_gid)) == 0 &&
            connect_request.psn == attr_.rq_psn &&
            connect_request.gid_type == static_cast<std::uint32_t>(gid_type_at(route.sgid_index));
        if (receives_requests() && expected && !closing_) {
            reply.ready = 1;
            connection->serving = true;
            connection->generation = generation_;
        }
    }
    const bool ready = send_all(socket, &reply, sizeof reply) && reply.ready == 1;
    return ready ? std::move(link) : nullptr;
}

// Wait until there are requests after the first `served`. Return false at the end of the connection; requests that were
// not started are then dropped, as packets that never reach a device.
bool QueuePair::wait_for_request(const Connection& connection, Link* link, std::uint32_t served) {
    if (spin_until([&] { return link->submitted() != served; })) {
        return true;
    }
    while (link->request_wake_after(served)) {
        char wakes[64];
        const ssize_t received = recv(connection.socket.get(), wakes, sizeof wakes, 0);
        if (received == 0 || (received < 0 && errno != EINTR)) {
            return false;
        }
        if (link->submitted() != served) {
            break;
        }
    }
    return true;
}

void QueuePair::serve_requests(Connection* connection, Link* link, IncomingMessage* incoming) {
    for (std::uint32_t served = 0; wait_for_request(*connection, link, served);) {
        const std::uint32_t submitted = link->submitted();
        if (submitted - served > Link::slot_count) {
            return;
        }
        while (served != submitted) {
            if (link->ended()) {
                return;
            }
            const auto batch_count = serve_write_batch(connection, link, served, submitted, *incoming);
            if (!batch_count || (*batch_count == 0 && !serve_request(connection, link, served, incoming))) {
                return;
            }
            served += std::max(*batch_count, 1U);
        }
    }
}

bool QueuePair::serve_request(Connection* connection, Link* link, std::uint32_t number, IncomingMessage* incoming) {
    const wire::Request request = link->request(number);
    if (!wire::well_formed(request) || !Link::payload_in_bounds(request)) {
        return false;
    }
    // A message continues where it stopped, and no other message starts before it has ended.
    if (incoming->active
            ? (request.opcode != wire::Opcode::send || request.chunk_offset_bytes != incoming->arrived_bytes ||
               request.message_bytes != incoming->message_bytes)
            : (request.opcode == wire::Opcode::send && request.chunk_offset_bytes != 0)) {
        return false;
    }
    if (!may_serve(*connection)) {
        return false;
    }
    const wire::Response response = execute(request, link, incoming, *connection);
    if (response.magic != wire::magic) {
        return false;
    }
    if (response.status == wire::Status::done) {
        count_served(request);
    }
    link->put_response(number, response);
    link->publish_responses(number + 1, connection->socket.get());
    return !ends_connection(response.status);
}

bool QueuePair::may_serve(const Connection& connection) {
    Lock lock(mutex_);
    return !closing_ && receives_requests() && connection.generation == generation_;
}

wire::Response QueuePair::execute(const wire::Request& request, Link* link, IncomingMessage* incoming,
                                  const Connection& connection) {
    switch (request.opcode) {
    case wire::Opcode::send:
        return execute_send(request, link->memory(), incoming, connection);
    case wire::Opcode::write:
        return execute_write(request, link, incoming, connection);
    case wire::Opcode::read:
        return execute_read(request, &link->memory(), connection);
    default:
        return execute_atomic(request, connection);
    }
}

bool QueuePair::permits(unsigned access) {
    Lock lock(mutex_);
    const bool reads = (access & (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
    return (attr_.qp_access_flags & access) == access && (!reads || attr_.max_dest_rd_atomic > 0);
}

// Copy the payload of a write into the region.
RegionError QueuePair::write_payload(const wire::Request& request, Region* region, Link* link) {
    const std::uint64_t address = request.remote_address + request.chunk_offset_bytes;
    if ((request.flags & wire::flag_piped) == 0) {
        return region->write(address, link->memory(), request.payload_offset, request.chunk_bytes);
    }
    if (region->mapped()) {
        return region->read_from(address, &link->pipe(), request.chunk_bytes);
    }
    BounceBuffer* const buffer = link->private_buffer();
    if (buffer == nullptr) {
        return RegionError::fault;
    }
    return link->pipe().read(buffer->at(0), request.chunk_bytes) == 0
               ? region->write(address, *buffer, 0, request.chunk_bytes)
               : RegionError::lost;
}

wire::Response QueuePair::execute_write(const wire::Request& request, Link* link, IncomingMessage* incoming,
                                        const Connection& connection) {
    if (!permits(IBV_ACCESS_REMOTE_WRITE)) {
        return fail_request(wire::Status::invalid_request, IBV_EVENT_QP_REQ_ERR, connection);
    }
    // The key of an empty message is not checked.
    std::shared_ptr<Region> region;
    if (request.message_bytes > 0) {
        region =
            find_by_rkey(request.rkey, domain_, IBV_ACCESS_REMOTE_WRITE, request.remote_address, request.message_bytes);
        if (region == nullptr) {
            return fail_request(RegionError::refused, connection);
        }
    }
    const bool consumes_receive = (request.flags & wire::flag_immediate) != 0 && wire::last_chunk(request);
    if (consumes_receive && !consume_receive(incoming)) {
        return receiver_not_ready_response();
    }
    if (region != nullptr) {
        const RegionError error = write_payload(request, region.get(), link);
        if (error == RegionError::lost) {
            // The requester does not wait for a response.
            return {};
        }
        if (error != RegionError::none) {
            return fail_request(error, connection);
        }
    }
    return consumes_receive ? finish_receive(request, incoming, connection) : wire::make_response(wire::Status::done);
}

wire::Response QueuePair::execute_read(const wire::Request& request, BounceBuffer* bounce,
                                       const Connection& connection) {
    if (!permits(IBV_ACCESS_REMOTE_READ)) {
        return fail_request(wire::Status::invalid_request, IBV_EVENT_QP_REQ_ERR, connection);
    }
    if (request.message_bytes > 0) {
        const auto region =
            find_by_rkey(request.rkey, domain_, IBV_ACCESS_REMOTE_READ, request.remote_address, request.message_bytes);
        const std::uint64_t address = request.remote_address + request.chunk_offset_bytes;
        const RegionError error = region == nullptr
                                      ? RegionError::refused
                                      : region->read(address, bounce, request.payload_offset, request.chunk_bytes);
        if (error != RegionError::none) {
            return fail_request(error, connection);
        }
    }
    wire::Response response = wire::make_response(wire::Status::done);
    response.payload_bytes = request.chunk_bytes;
    return response;
}

wire::Response QueuePair::execute_atomic(const wire::Request& request, const Connection& connection) {
    if (!permits(IBV_ACCESS_REMOTE_ATOMIC) || request.remote_address % 8 != 0) {
        return fail_request(wire::Status::invalid_request, IBV_EVENT_QP_REQ_ERR, connection);
    }
    const auto region = find_by_rkey(request.rkey, domain_, IBV_ACCESS_REMOTE_ATOMIC, request.remote_address, 8);
    wire::Response response = wire::make_response(wire::Status::done);
    const auto changed = [&](std::uint64_t original) {
        if (request.opcode == wire::Opcode::fetch_and_add) {
            return original + request.compare_or_add;
        }
        return original == request.compare_or_add ? request.swap : original;
    };
    const RegionError error = region == nullptr
                                  ? RegionError::refused
                                  : region->atomic_update(request.remote_address, &response.original, changed);
    return error == RegionError::none ? response : fail_request(error, connection);
}

wire::Response QueuePair::fail_request(wire::Status status, ibv_event_type event, const Connection& connection) {
    Lock lock(mutex_);
    if (connection.generation == generation_) {
        fail(lock, event, &connection);
    }
    return wire::make_response(status);
}

wire::Response QueuePair::fail_request(RegionError error, const Connection& connection) {
    return error == RegionError::refused
               ? fail_request(wire::Status::access_refused, IBV_EVENT_QP_ACCESS_ERR, connection)
               : fail_request(wire::Status::operation_failed, IBV_EVENT_QP_FATAL, connection);
}

void QueuePair::count_served(const wire::Request& request) {
    Traffic::Direction& served = context_->device->traffic.served;
    if (wire::last_chunk(request)) {
        ++served.requests;
    }
    switch (request.opcode) {
    case wire::Opcode::send:
        served.send_bytes += request.chunk_bytes;
        break;
    case wire::Opcode::write:
        served.write_bytes += request.chunk_bytes;
        break;
    case wire::Opcode::read:
        served.read_bytes += request.chunk_bytes;
        break;
    default:
        // Atomic requests are counted as requests only.
        break;
    }
}

} // namespace gdrkit::twin::verbs
