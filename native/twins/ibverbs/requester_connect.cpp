// How the requester of a queue pair finds its peer, and what it is when there is none.
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>

#include "ibverbs/queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A peer that does not say its welcome in this time is given up.
constexpr timeval longest_silence{30, 0};
constexpr std::uint64_t longest_retry_us = 2'000'000;
constexpr std::uint64_t pause_between_tries_us = 1000;

// How long a request is tried again before it is given up; 0: for ever.
std::uint64_t retry_time_us(const ibv_qp_attr& attr) {
    if (attr.timeout == 0) {
        return 0;
    }
    const std::uint64_t once_us = (4096ULL << attr.timeout) / 1000;
    return std::clamp<std::uint64_t>(once_us * (attr.retry_cnt + 1U), 1, longest_retry_us);
}

} // namespace

ibv_wc_status QueuePair::connect_to_peer(const ibv_qp_attr& attr) {
    if (peer_) {
        return IBV_WC_SUCCESS;
    }
    const std::string name = wire::name_of(attr.ah_attr.grh.dgid, attr.dest_qp_num);
    const std::uint64_t retry_us = retry_time_us(attr);
    const auto deadline = Clock::now() + std::chrono::microseconds(retry_us);
    for (;;) {
        if (Fd socket(connect_to(name)); socket) {
            setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &longest_silence, sizeof longest_silence);
            setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &longest_silence, sizeof longest_silence);
            {
                Lock lock(mutex_);
                if (interrupted()) {
                    return IBV_WC_WR_FLUSH_ERR;
                }
                peer_ = std::move(socket);
            }
            if (introduce(attr)) {
                return IBV_WC_SUCCESS;
            }
            Lock lock(mutex_);
            peer_.reset();
        }
        if (retry_us != 0 && Clock::now() >= deadline) {
            return lost();
        }
        if (!wait_unless_interrupted(pause_between_tries_us)) {
            return IBV_WC_WR_FLUSH_ERR;
        }
    }
}

bool QueuePair::introduce(const ibv_qp_attr& attr) {
    const int socket = peer_.get();
    wire::Hello hello{};
    hello.magic = wire::magic;
    hello.version = wire::version;
    hello.source_gid = context_->device->gid;
    hello.destination_gid = attr.ah_attr.grh.dgid;
    hello.source_qpn = number_;
    hello.destination_qpn = attr.dest_qp_num;
    hello.psn = attr.sq_psn;
    hello.gid_type = gid_type_at(attr.ah_attr.grh.sgid_index);
    // New for each: nobody who once said no keeps a hand on it.
    link_ = Link::make();
    if (link_ == nullptr) {
        return false;
    }
    wire::Welcome welcome{};
    return send_all(socket, &hello, sizeof hello) && send_fds(socket, link_->fds()) &&
           recv_all(socket, &welcome, sizeof welcome) && welcome.magic == wire::magic && welcome.ready == 1;
}

// The peer cannot be reached: it is gone, or the pair itself was told to stop.
ibv_wc_status QueuePair::lost() {
    Lock lock(mutex_);
    return interrupted() ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR;
}

bool QueuePair::wait_unless_interrupted(std::uint64_t time_us) {
    Lock lock(mutex_);
    return !changed_.wait_for(lock, std::chrono::microseconds(time_us), [this] { return interrupted(); });
}

} // namespace gdrkit::twin::verbs
