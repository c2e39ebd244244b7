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

wire::Response response_of(wire::Answer answer) {
    wire::Response response{};
    response.magic = wire::magic;
    response.answer = answer;
    return response;
}

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
    if (welcome(own)) {
        const auto bounce = Bounce::make();
        Arriving arriving;
        while (bounce != nullptr && serve_one(own, bounce.get(), &arriving)) {
        }
        give_back(&arriving, *own);
    }
    Lock lock(mutex_);
    own->socket.reset();
    own->serving = false;
    own->ended = true;
    changed_.notify_all();
}

bool QueuePair::welcome(Connection* own) {
    wire::Hello hello{};
    if (!recv_all(own->socket.get(), &hello, sizeof hello) || !wire::well_formed(hello)) {
        return false;
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
    return send_all(own->socket.get(), &welcome, sizeof welcome) && welcome.ready == 1;
}

bool QueuePair::serve_one(Connection* own, Bounce* bounce, Arriving* arriving) {
    const int socket = own->socket.get();
    wire::Request request{};
    if (!recv_all(socket, &request, sizeof request) || !wire::well_formed(request)) {
        return false;
    }
    if (wire::carries_payload(request.opcode) && !recv_all(socket, bounce->at(0), request.chunk_bytes)) {
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
    const wire::Response response = answer(request, bounce, arriving, *own);
    if (response.answer == wire::Answer::done) {
        count_served(request);
    }
    return send_all(socket, &response, sizeof response) && send_all(socket, bounce->at(0), response.payload_bytes) &&
           !ends_connection(response.answer);
}

bool QueuePair::still_serving(const Connection& own) {
    Lock lock(mutex_);
    return !closing_ && receives_requests() && own.generation == generation_;
}

wire::Response QueuePair::answer(const wire::Request& request, Bounce* bounce, Arriving* arriving,
                                 const Connection& own) {
    switch (request.opcode) {
    case wire::Opcode::send:
        return answer_send(request, *bounce, arriving, own);
    case wire::Opcode::write:
        return answer_write(request, *bounce, arriving, own);
    case wire::Opcode::read:
        return answer_read(request, bounce, own);
    default:
        return answer_atomic(request, bounce, own);
    }
}

bool QueuePair::permits(unsigned access) {
    Lock lock(mutex_);
    const bool reads = (access & (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
    return (attr_.qp_access_flags & access) == access && (!reads || attr_.max_dest_rd_atomic > 0);
}

wire::Response QueuePair::answer_write(const wire::Request& request, const Bounce& bounce, Arriving* arriving,
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
        const std::uint64_t address = request.remote_address + request.chunk_offset_bytes;
        if (const RegionError error = region->write(address, bounce, 0, request.chunk_bytes);
            error != RegionError::none) {
            return refuse(error, own);
        }
    }
    return tells ? finish_receive(request, arriving, own) : response_of(wire::Answer::done);
}

wire::Response QueuePair::answer_read(const wire::Request& request, Bounce* bounce, const Connection& own) {
    if (!permits(IBV_ACCESS_REMOTE_READ)) {
        return refuse(wire::Answer::invalid_request, IBV_EVENT_QP_REQ_ERR, own);
    }
    if (request.message_bytes > 0) {
        const auto region =
            find_remote(request.rkey, domain_, IBV_ACCESS_REMOTE_READ, request.remote_address, request.message_bytes);
        const std::uint64_t address = request.remote_address + request.chunk_offset_bytes;
        const RegionError error =
            region == nullptr ? RegionError::refused : region->read(address, bounce, 0, request.chunk_bytes);
        if (error != RegionError::none) {
            return refuse(error, own);
        }
    }
    wire::Response response = response_of(wire::Answer::done);
    response.payload_bytes = request.chunk_bytes;
    return response;
}

wire::Response QueuePair::answer_atomic(const wire::Request& request, Bounce* bounce, const Connection& own) {
    if (!permits(IBV_ACCESS_REMOTE_ATOMIC) || request.remote_address % 8 != 0) {
        return refuse(wire::Answer::invalid_request, IBV_EVENT_QP_REQ_ERR, own);
    }
    const auto region = find_remote(request.rkey, domain_, IBV_ACCESS_REMOTE_ATOMIC, request.remote_address, 8);
    wire::Response response = response_of(wire::Answer::done);
    const auto changed = [&](std::uint64_t original) {
        if (request.opcode == wire::Opcode::fetch_and_add) {
            return original + request.compare_or_add;
        }
        return original == request.compare_or_add ? request.swap : original;
    };
    const RegionError error = region == nullptr
                                  ? RegionError::refused
                                  : region->change(request.remote_address, bounce, &response.original, changed);
    return error == RegionError::none ? response : refuse(error, own);
}

wire::Response QueuePair::answer_send(const wire::Request& request, const Bounce& bounce, Arriving* arriving,
                                      const Connection& own) {
    if (!arriving->active) {
        if (!take_receive(arriving)) {
            return not_ready();
        }
        arriving->message_bytes = request.message_bytes;
        if (request.message_bytes > arriving->work.length_bytes) {
            return fail_receive(arriving, IBV_WC_LOC_LEN_ERR, wire::Answer::invalid_request, own);
        }
    }
    if (scatter(arriving->work, request.chunk_offset_bytes, bounce, request.chunk_bytes) != RegionError::none) {
        return fail_receive(arriving, IBV_WC_LOC_PROT_ERR, wire::Answer::operation_failed, own);
    }
    arriving->arrived_bytes += request.chunk_bytes;
    return wire::last_chunk(request) ? finish_receive(request, arriving, own) : response_of(wire::Answer::done);
}

wire::Response QueuePair::refuse(wire::Answer answer, ibv_event_type event, const Connection& own) {
    Lock lock(mutex_);
    if (own.generation == generation_) {
        fail(lock, event, &own);
    }
    return response_of(answer);
}

wire::Response QueuePair::refuse(RegionError error, const Connection& own) {
    return error == RegionError::refused ? refuse(wire::Answer::access_refused, IBV_EVENT_QP_ACCESS_ERR, own)
                                         : refuse(wire::Answer::operation_failed, IBV_EVENT_QP_FATAL, own);
}

wire::Response QueuePair::not_ready() {
    Lock lock(mutex_);
    wire::Response response = response_of(wire::Answer::receiver_not_ready);
    response.rnr_timer = attr_.min_rnr_timer;
    return response;
}

bool QueuePair::take_receive(Arriving* arriving) {
    Lock lock(mutex_);
    if (receives_.empty() || !receives_requests()) {
        return false;
    }
    *arriving = Arriving{};
    arriving->work = std::move(receives_.front());
    receives_.pop_front();
    arriving->active = true;
    ++arriving_count_;
    return true;
}

void QueuePair::give_back(Arriving* arriving, const Connection& own) {
    Lock lock(mutex_);
    if (!arriving->active) {
        return;
    }
    // The message never ended, so the receive is the first again, for the next message or to be flushed.
    if (own.generation == generation_) {
        receives_.push_front(std::move(arriving->work));
    }
    arriving->active = false;
    --arriving_count_;
    changed_.notify_all();
}

RegionError QueuePair::scatter(const ReceiveWork& work, std::uint64_t offset, const Bounce& bounce, std::size_t size) {
    std::uint64_t skip = offset;
    std::size_t moved = 0;
    for (const ibv_sge& piece : work.pieces) {
        if (skip >= piece.length) {
            skip -= piece.length;
            continue;
        }
        const std::size_t part = std::min<std::size_t>(piece.length - skip, size - moved);
        if (part == 0) {
            break;
        }
        const std::uint64_t address = piece.addr + skip;
        const auto region = find_local(piece.lkey, domain_, IBV_ACCESS_LOCAL_WRITE, address, part);
        const RegionError error =
            region == nullptr ? RegionError::refused : region->write(address, bounce, moved, part);
        if (error != RegionError::none) {
            return error;
        }
        moved += part;
        skip = 0;
    }
    return RegionError::none;
}

wire::Response QueuePair::finish_receive(const wire::Request& request, Arriving* arriving, const Connection& own) {
    ibv_wc wc{};
    wc.status = IBV_WC_SUCCESS;
    wc.opcode = request.opcode == wire::Opcode::write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
    wc.byte_len = static_cast<std::uint32_t>(request.message_bytes);
    if ((request.flags & wire::flag_immediate) != 0) {
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.imm_data = request.immediate;
    }
    be_late();
    Lock lock(mutex_);
    arriving->active = false;
    --arriving_count_;
    if (own.generation == generation_) {
        complete_receive(lock, arriving->work, wc, (request.flags & wire::flag_solicited) != 0);
    }
    changed_.notify_all();
    return response_of(wire::Answer::done);
}

wire::Response QueuePair::fail_receive(Arriving* arriving, ibv_wc_status status, wire::Answer answer,
                                       const Connection& own) {
    ibv_wc wc{};
    wc.status = status;
    wc.opcode = IBV_WC_RECV;
    be_late();
    Lock lock(mutex_);
    arriving->active = false;
    --arriving_count_;
    if (own.generation == generation_) {
        complete_receive(lock, arriving->work, wc, false);
        enter_error(lock, &own);
    }
    changed_.notify_all();
    return response_of(answer);
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
