// The threads of a queue pair that serve its peers. Here the target checks, for every chunk, key, bounds, permission
// and state.
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

// One peer needs one connection; the others are those of peers that tried before this side was ready, and strangers.
constexpr std::size_t connections_most = 16;

bool ends_connection(wire::Answer answer) {
    return answer != wire::Answer::done && answer != wire::Answer::receiver_not_ready;
}

} // namespace

void QueuePair::run_acceptor() {
    for (;;) {
        Fd socket(accept_from(listener_.get()));
        Lock lock(mutex_);
        if (closing_) {
            return;
        }
        join_ended(lock);
        if (!socket) {
            // Out of descriptors or memory: a connection may end and free some.
            changed_.wait_for(lock, std::chrono::milliseconds(10), [this] { return closing_; });
            continue;
        }
        if (!same_user(socket.get())) {
            continue;
        }
        if (connections_.size() >= connections_most) {
            make_room(lock);
            continue;
        }
        Connection& connection = connections_.emplace_back();
        connection.socket = std::move(socket);
        try {
            connection.thread = start_quiet_thread([this, &connection] { run_responder(&connection); });
        } catch (const std::system_error&) {
            // No thread for it: the peer sees the end of file and tries again.
            connections_.pop_back();
        }
    }
}

void QueuePair::join_ended(const Lock&) {
    for (auto connection = connections_.begin(); connection != connections_.end();) {
        if (connection->ended) {
            connection->thread.join();
            connection = connections_.erase(connection);
        } else {
            ++connection;
        }
    }
}

// Ends the oldest connection that has not said who it is. The peer that found no room tries again.
void QueuePair::make_room(const Lock&) {
    const auto silent = std::find_if(connections_.begin(), connections_.end(), [](const Connection& connection) {
        return !connection.serving && connection.socket;
    });
    if (silent != connections_.end()) {
        shutdown(silent->socket.get(), SHUT_RDWR);
    }
}

void QueuePair::run_responder(Connection* own) {
    if (const auto link = welcome(own)) {
        Arriving arriving;
        serve(own, link.get(), &arriving);
        give_back(&arriving, *own);
    }
    Lock lock(mutex_);
    own->socket.reset();
    own->serving = false;
    own->ended = true;
    ring(lock);
}

std::unique_ptr<Link> QueuePair::welcome(Connection* own) {
    const int socket = own->socket.get();
    wire::Hello hello{};
    std::vector<Fd> shared;
    if (!recv_all(socket, &hello, sizeof hello) || !wire::well_formed(hello) ||
        !recv_fds(socket, Link::fd_count, &shared)) {
        return nullptr;
    }
    auto link = Link::adopt(std::move(shared));
    if (link == nullptr) {
        return nullptr;
    }
    wire::Welcome welcome{wire::magic, 0};
    {
        Lock lock(mutex_);
        const ibv_global_route& route = attr_.ah_attr.grh;
        const bool expected = hello.destination_qpn == number_ && hello.source_qpn == attr_.dest_qp_num &&
                              std::memcmp(&hello.source_gid, &route.dgid, sizeof route.dgid) == 0 &&
                              std::memcmp(&hello.destination_gid, &context_->device->gid, sizeof(ibv_gid)) == 0 &&
                              hello.psn == attr_.rq_psn &&
                              hello.gid_type == static_cast<std::uint32_t>(gid_type_at(route.sgid_index));
        if (receives_requests() && expected && !closing_) {
            welcome.ready = 1;
            own->serving = true;
            own->generation = generation_;
        }
    }
    const bool ready = send_all(socket, &welcome, sizeof welcome) && welcome.ready == 1;
    return ready ? std::move(link) : nullptr;
}

// Until there are requests after the first `served` ones. False at the end of the connection: what the peer had asked
// for and nobody began is dropped, as it is on the way to a device.
bool QueuePair::await_request(const Connection& own, Link* link, std::uint32_t served) {
    if (spin_until([&] { return link->submitted() != served; })) {
        return true;
    }
    while (link->ask_wake_after(served)) {
        char wakes[64];
        const ssize_t got = recv(own.socket.get(), wakes, sizeof wakes, 0);
        if (got == 0 || (got < 0 && errno != EINTR)) {
            return false;
        }
        if (link->submitted() != served) {
            break;
        }
    }
    return true;
}

void QueuePair::serve(Connection* own, Link* link, Arriving* arriving) {
    for (std::uint32_t served = 0; await_request(*own, link, served);) {
        const std::uint32_t submitted = link->submitted();
        if (submitted - served > Link::slot_count) {
            return;
        }
        while (served != submitted) {
            if (link->ended()) {
                return;
            }
            const auto together = serve_writes(own, link, served, submitted, *arriving);
            if (!together || (*together == 0 && !serve_one(own, link, served, arriving))) {
                return;
            }
            served += std::max(*together, 1U);
        }
    }
}

bool QueuePair::serve_one(Connection* own, Link* link, std::uint32_t number, Arriving* arriving) {
    const wire::Request request = link->request(number);
    if (!wire::well_formed(request) || !Link::holds(request)) {
        return false;
    }
    // A message goes on where it stopped, and no other begins before it ended.
    if (arriving->active
            ? (request.opcode != wire::Opcode::send || request.chunk_offset_bytes != arriving->arrived_bytes ||
               request.message_bytes != arriving->message_bytes)
            : (request.opcode == wire::Opcode::send && request.chunk_offset_bytes != 0)) {
        return false;
    }
    if (!still_serving(*own)) {
        return false;
    }
    const wire::Response response = answer(request, link, arriving, *own);
    if (response.magic != wire::magic) {
        return false;
    }
    if (response.answer == wire::Answer::done) {
        count_served(request);
    }
    link->answer(number, response);
    link->publish_answers(number + 1, own->socket.get());
    return !ends_connection(response.answer);
}

bool QueuePair::still_serving(const Connection& own) {
    Lock lock(mutex_);
    return !closing_ && receives_requests() && own.generation == generation_;
}

wire::Response QueuePair::answer(const wire::Request& request, Link* link, Arriving* arriving, const Connection& own) {
    switch (request.opcode) {
    case wire::Opcode::send:
        return answer_send(request, link->memory(), arriving, own);
    case wire::Opcode::write:
        return answer_write(request, link, arriving, own);
    case wire::Opcode::read:
        return answer_read(request, &link->memory(), own);
    default:
        return answer_atomic(request, own);
    }
}

bool QueuePair::permits(unsigned access) {
    Lock lock(mutex_);
    const bool reads = (access & (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
    return (attr_.qp_access_flags & access) == access && (!reads || attr_.max_dest_rd_atomic > 0);
}

// The bytes of a write, from where they lie into the region.
RegionError QueuePair::land(const wire::Request& request, Region* region, Link* link) {
    const std::uint64_t address = request.remote_address + request.chunk_offset_bytes;
    if ((request.flags & wire::flag_piped) == 0) {
        return region->write(address, link->memory(), request.payload_at, request.chunk_bytes);
    }
    if (region->mapped()) {
        return region->take(address, &link->pipe(), request.chunk_bytes);
    }
    Bounce* const own = link->own_memory();
    if (own == nullptr) {
        return RegionError::fault;
    }
    return link->pipe().take(own->at(0), request.chunk_bytes) == 0
               ? region->write(address, *own, 0, request.chunk_bytes)
               : RegionError::lost;
}

wire::Response QueuePair::answer_write(const wire::Request& request, Link* link, Arriving* arriving,
                                       const Connection& own) {
    if (!permits(IBV_ACCESS_REMOTE_WRITE)) {
        return refuse(wire::Answer::invalid_request, IBV_EVENT_QP_REQ_ERR, own);
    }
    // The key of a message without bytes is not looked at.
    std::shared_ptr<Region> region;
    if (request.message_bytes > 0) {
        region =
            find_remote(request.rkey, domain_, IBV_ACCESS_REMOTE_WRITE, request.remote_address, request.message_bytes);
        if (region == nullptr) {
            return refuse(RegionError::refused, own);
        }
    }
    const bool tells = (request.flags & wire::flag_immediate) != 0 && wire::last_chunk(request);
    if (tells && !take_receive(arriving)) {
        return not_ready();
    }
    if (region != nullptr) {
        const RegionError error = land(request, region.get(), link);
        if (error == RegionError::lost) {
            // No answer: nobody waits for one.
            return {};
        }
        if (error != RegionError::none) {
            return refuse(error, own);
        }
    }
    return tells ? finish_receive(request, arriving, own) : wire::response_of(wire::Answer::done);
}

wire::Response QueuePair::answer_read(const wire::Request& request, Bounce* bounce, const Connection& own) {
    if (!permits(IBV_ACCESS_REMOTE_READ)) {
        return refuse(wire::Answer::invalid_request, IBV_EVENT_QP_REQ_ERR, own);
    }
    if (request.message_bytes > 0) {
        const auto region =
            find_remote(request.rkey, domain_, IBV_ACCESS_REMOTE_READ, request.remote_address, request.message_bytes);
        const std::uint64_t address = request.remote_address + request.chunk_offset_bytes;
        const RegionError error = region == nullptr
                                      ? RegionError::refused
                                      : region->read(address, bounce, request.payload_at, request.chunk_bytes);
        if (error != RegionError::none) {
            return refuse(error, own);
        }
    }
    wire::Response response = wire::response_of(wire::Answer::done);
    response.payload_bytes = request.chunk_bytes;
    return response;
}

wire::Response QueuePair::answer_atomic(const wire::Request& request, const Connection& own) {
    if (!permits(IBV_ACCESS_REMOTE_ATOMIC) || request.remote_address % 8 != 0) {
        return refuse(wire::Answer::invalid_request, IBV_EVENT_QP_REQ_ERR, own);
    }
    const auto region = find_remote(request.rkey, domain_, IBV_ACCESS_REMOTE_ATOMIC, request.remote_address, 8);
    wire::Response response = wire::response_of(wire::Answer::done);
    const auto changed = [&](std::uint64_t original) {
        if (request.opcode == wire::Opcode::fetch_and_add) {
            return original + request.compare_or_add;
        }
        return original == request.compare_or_add ? request.swap : original;
    };
    const RegionError error =
        region == nullptr ? RegionError::refused : region->change(request.remote_address, &response.original, changed);
    return error == RegionError::none ? response : refuse(error, own);
}

wire::Response QueuePair::refuse(wire::Answer answer, ibv_event_type event, const Connection& own) {
    Lock lock(mutex_);
    if (own.generation == generation_) {
        fail(lock, event, &own);
    }
    return wire::response_of(answer);
}

wire::Response QueuePair::refuse(RegionError error, const Connection& own) {
    return error == RegionError::refused ? refuse(wire::Answer::access_refused, IBV_EVENT_QP_ACCESS_ERR, own)
                                         : refuse(wire::Answer::operation_failed, IBV_EVENT_QP_FATAL, own);
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
        // An atomic request counts as a request only.
        break;
    }
}

} // namespace gdrkit::twin::verbs
