// How the requester thread connects to the peer's queue pair, and which completion status it reports if it cannot.
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>

#include "ibverbs/queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A peer that does not reply to the connect request in this time is given up.
constexpr timeval peer_timeout{30, 0};
constexpr std::uint64_t max_retry_us = 2'000'000;
constexpr std::uint64_t pause_between_tries_us = 1000;

// Time in which a connection is retried, from the timeout and retry_cnt attributes; 0: without limit.
std::uint64_t retry_time_us(const ibv_qp_attr& attr) {
    if (attr.timeout == 0) {
        return 0;
    }
    const std::uint64_t once_us = (4096ULL << attr.timeout) / 1000;
    return std::clamp<std::uint64_t>(once_us * (attr.retry_cnt + 1U), 1, max_retry_us);
}

} // namespace

ibv_wc_status QueuePair::connect_to_peer(const ibv_qp_attr& attr) {
    if (peer_) {
        return IBV_WC_SUCCESS;
    }
    const std::string name = wire::socket_name_of(attr.ah_attr.grh.dgid, attr.dest_qp_num);
    const std::uint64_t retry_us = retry_time_us(attr);
    const auto deadline = Clock::now() + std::chrono::microseconds(retry_us);
    for (;;) {
        if (Fd socket(connect_to(name)); socket) {
            setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &peer_timeout, sizeof peer_timeout);
            setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &peer_timeout, sizeof peer_timeout);
            {
                Lock lock(mutex_);
                if (interrupted()) {
                    return IBV_WC_WR_FLUSH_ERR;
                }
                peer_ = std::move(socket);
            }
            if (handshake(attr)) {
                return IBV_WC_SUCCESS;
            }
            Lock lock(mutex_);
            peer_.reset();
        }
        if (retry_us != 0 && Clock::now() >= deadline) {
            return connection_lost_status();
        }
        if (!sleep_unless_interrupted(pause_between_tries_us)) {
            return IBV_WC_WR_FLUSH_ERR;
        }
    }
}

bool QueuePair::handshake(const ibv_qp_attr& attr) {
    const int socket = peer_.get();
    wire::ConnectRequest connect_request{};
    connect_request.magic = wire::magic;
    connect_request.version = wire::version;
    connect_request.source_gid = context_->device->gid;
    connect_request.destination_gid = attr.ah_attr.grh.dgid;
    connect_request.source_qpn = number_;
    connect_request.destination_qpn = attr.dest_qp_num;
    connect_request.psn = attr.sq_psn;
    connect_request.gid_type = gid_type_at(attr.ah_attr.grh.sgid_index);
    // New memory for each attempt, so that no peer that refused keeps a mapping of it.
    link_ = Link::make();
    if (link_ == nullptr) {
        return false;
    }
    wire::ConnectReply reply{};
    return send_all(socket, &connect_request, sizeof connect_request) && send_fds(socket, link_->fds()) &&
           recv_all(socket, &reply, sizeof reply) && reply.magic == wire::magic && reply.ready == 1;
}

// Return the status for an unreachable peer: flushed if this pair was told to stop, else retry exceeded.
ibv_wc_status QueuePair::connection_lost_status() {
    Lock lock(mutex_);
    return interrupted() ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR;
}

bool QueuePair::sleep_unless_interrupted(std::uint64_t time_us) {
    Lock lock(mutex_);
    return !changed_.wait_for(lock, std::chrono::microseconds(time_us), [this] { return interrupted(); });
}

} // namespace gdrkit::twin::verbs
