// The requester thread connects to the peer's queue pair, or determines the completion status of a failed connection.
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cstring>

#include "ibverbs/connected_queue_pair.hpp"
#include "ibverbs/tcp_link.hpp"
#include "model/fabric.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A peer that does not reply to the connect request in this time is considered stopped.
constexpr timeval peer_timeout{30, 0};
// Limits of the time in which the machine of a peer on the TCP fabric must acknowledge data.
constexpr std::chrono::milliseconds min_remote_timeout{1000}, max_remote_timeout{30'000};
constexpr std::uint64_t max_retry_us = 2'000'000; // the requester tries to connect for at most 2 s
// The loss of a peer is reported after at most this time. Hardware may try for minutes.
constexpr std::uint64_t max_loss_delay_us = 100'000;
constexpr std::uint64_t pause_between_attempts_us = 1000;

// Return the time that all tries of one request take. The attribute `timeout` means 4.096 us * 2^timeout for each try.
std::uint64_t compute_all_tries_us(const ibv_qp_attr& attr) {
    return (4096ULL << attr.timeout) / 1000 * (attr.retry_cnt + 1U);
}

// Return for how long the requester tries to connect, computed from the timeout and retry_cnt attributes. 0 means that
// it tries without a time limit.
std::uint64_t compute_retry_time_us(const ibv_qp_attr& attr) {
    if (attr.timeout == 0) {
        return 0;
    }
    return std::clamp<std::uint64_t>(compute_all_tries_us(attr), 1, max_retry_us);
}

} // namespace

ibv_wc_status ConnectedQueuePair::connect_to_peer(const ibv_qp_attr& attr) {
    if (peer_socket_) {
        return IBV_WC_SUCCESS;
    }
    const std::uint64_t retry_time_us = compute_retry_time_us(attr);
    const auto deadline = Clock::now() + std::chrono::microseconds(retry_time_us);
    for (;;) {
        if (Fd socket(connect_socket(attr)); socket) {
            {
                Lock lock(mutex_);
                if (is_interrupted()) {
                    return IBV_WC_WR_FLUSH_ERR;
                }
                peer_socket_ = std::move(socket);
            }
            if (handshake(attr)) {
                return IBV_WC_SUCCESS;
            }
            Lock lock(mutex_);
            peer_socket_.reset();
        }
        if (!is_reliable() || (retry_time_us != 0 && Clock::now() >= deadline)) {
            return choose_connection_lost_status();
        }
        if (!sleep_unless_interrupted(pause_between_attempts_us)) {
            return IBV_WC_WR_FLUSH_ERR;
        }
    }
}

// Connect to the peer on this machine, or on another machine of the TCP fabric. Return the socket or -errno.
int ConnectedQueuePair::connect_socket(const ibv_qp_attr& attr) {
    const ibv_gid& gid = attr.ah_attr.grh.dgid;
    const FabricAddress address = make_fabric_address(gid);
    int socket = -1;
    if (is_on_other_machine(address)) {
        // Hardware may take up to four times the configured time of all tries.
        const auto timeout = std::chrono::milliseconds(4 * compute_all_tries_us(attr) / 1000);
        socket = connect_to_fabric(address, static_cast<std::uint16_t>(attr.dest_qp_num),
                                   attr.timeout == 0 ? std::chrono::milliseconds(0)
                                                     : std::clamp(timeout, min_remote_timeout, max_remote_timeout));
    } else {
        socket = connect_to(wire::make_socket_name(gid, attr.dest_qp_num));
    }
    if (socket >= 0) {
        setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &peer_timeout, sizeof peer_timeout);
        setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &peer_timeout, sizeof peer_timeout);
    }
    return socket;
}

// Send the connect request with the descriptors of a new link, and receive the reply. Return whether the peer accepts.
bool ConnectedQueuePair::handshake(const ibv_qp_attr& attr) {
    const int socket = peer_socket_.get();
    wire::ConnectRequest connect_request{};
    connect_request.magic = wire::magic;
    connect_request.version = wire::version;
    connect_request.source_gid = context_->device->gid;
    connect_request.destination_gid = attr.ah_attr.grh.dgid;
    connect_request.source_qpn = qp_num_;
    connect_request.destination_qpn = attr.dest_qp_num;
    connect_request.psn = attr.sq_psn;
    connect_request.qp_type = type();
    connect_request.gid_type = get_gid_type(attr.ah_attr.grh.sgid_index);
    const bool is_remote = is_on_other_machine(make_fabric_address(attr.ah_attr.grh.dgid));
    // Each attempt uses new memory. A peer that has refused an attempt may still have the memory of that attempt
    // mapped.
    link_ = is_remote ? nullptr : Link::make();
    wire::ConnectReply reply{};
    if ((!is_remote && link_ == nullptr) || !send_all(socket, &connect_request, sizeof connect_request) ||
        (!is_remote && !send_fds(socket, link_->fds())) || !recv_all(socket, &reply, sizeof reply) ||
        reply.magic != wire::magic || reply.is_accepted != 1) {
        return false;
    }
    if (is_remote) {
        link_ = TcpLink::make_requester(socket);
    } else {
        peer_memory_ = PeerMemory::open(socket, reply, &link_->grants());
    }
    return link_ != nullptr;
}

// Return the completion status for a peer that cannot be reached: IBV_WC_WR_FLUSH_ERR if this pair has left RTS and SQD
// or is closed, else IBV_WC_RETRY_EXC_ERR.
ibv_wc_status ConnectedQueuePair::choose_connection_lost_status() {
    Lock lock(mutex_);
    return is_interrupted() ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR;
}

// Handle the end of the connection: the peer has ended it or sent an invalid response. The first unfinished request of
// a reliable pair fails. The started requests of an unreliable pair are lost, but complete with success; later requests
// need a new connection.
void ConnectedQueuePair::lose_connection() {
    RequesterState& requester = requester_state_;
    const ibv_wc_status status = choose_connection_lost_status();
    if (is_reliable() || status == IBV_WC_WR_FLUSH_ERR) {
        if (requester.started_sends.empty() && !requester.queued_sends.empty()) {
            requester.started_sends.push_back(std::move(requester.queued_sends.front()));
            requester.queued_sends.pop_front();
        }
        if (!requester.started_sends.empty()) {
            requester.first_send_error = status;
        }
        return;
    }
    RequesterState fresh_state;
    fresh_state.local_error = requester.local_error;
    // A request that failed locally is the last started one. It stays in started_sends and keeps its error.
    const std::size_t failed_count = requester.local_error ? 1 : 0;
    for (; requester.started_sends.size() > failed_count; requester.started_sends.pop_front()) {
        requester.finished_sends.push_back(std::move(requester.started_sends.front()));
    }
    fresh_state.queued_sends = std::move(requester.queued_sends);
    fresh_state.started_sends = std::move(requester.started_sends);
    fresh_state.finished_sends = std::move(requester.finished_sends);
    requester = std::move(fresh_state);
    Lock lock(mutex_);
    disconnect(lock);
}

// Return the delay after which the loss of a peer is reported. Hardware notices the loss only when the last try is not
// acknowledged. Programs rely on this delay: when the peer of ibv_srq_pingpong has ended, the last requests may fail,
// but not at once.
std::uint64_t ConnectedQueuePair::compute_loss_delay_us(const ibv_qp_attr& attr) {
    return std::min(compute_all_tries_us(attr), max_loss_delay_us);
}

bool ConnectedQueuePair::sleep_unless_interrupted(std::uint64_t time_us) {
    Lock lock(mutex_);
    return !state_changed_.wait_for(lock, std::chrono::microseconds(time_us), [this] { return is_interrupted(); });
}

} // namespace gdrkit::twin::verbs
