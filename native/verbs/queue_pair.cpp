// Creates completion queues and queue pairs, connects them, and posts transfers.
#include "verbs/queue_pair.hpp"

#include <fcntl.h>
#include <sys/random.h>

#include <algorithm>

#include "verbs/error.hpp"

namespace gdrkit::verbs {

namespace {

// The NIC sends a packet again if it is not acknowledged within 67 ms (4.096 us * 2^14), up to 7 times. So the failure
// of a peer is detected within a second.
constexpr std::uint8_t timeout_exponent = 14, retry_count = 7;
// If a receiver has no receive posted, the sender's NIC tries the send again after 0.64 ms (code 12), up to 6 times.
// ibv_modify_qp requires both values, although the transfers here need no receives.
constexpr std::uint8_t rnr_retry_count = 6, rnr_timer_code = 12;
constexpr std::uint8_t hop_limit = 64;
// Number of events that one call of ibv_ack_cq_events acknowledges.
constexpr unsigned events_per_ack = 64;

// IBV_MTU_256 is 1, and each further code means twice the size.
std::uint32_t convert_mtu_to_bytes(ibv_mtu mtu) {
    return 128U << mtu;
}

// Returns the code of the largest MTU that is at most `bytes`, or IBV_MTU_256.
ibv_mtu convert_bytes_to_mtu(std::uint32_t bytes) {
    int code = IBV_MTU_256;
    while (code < IBV_MTU_4096 && convert_mtu_to_bytes(static_cast<ibv_mtu>(code + 1)) <= bytes) {
        ++code;
    }
    return static_cast<ibv_mtu>(code);
}

} // namespace

CompletionQueue::CompletionQueue(const Device& device, int depth)
    : channel_(ibv_create_comp_channel(device.context())) {
    if (!channel_) {
        throw Error("ibv_create_comp_channel", last_errno(), device.name());
    }
    const int flags = fcntl(channel_->fd, F_GETFL);
    if (flags < 0 || fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK) < 0) {
        throw Error("fcntl", last_errno(), device.name());
    }
    queue_.reset(ibv_create_cq(device.context(), depth, nullptr, channel_.get(), 0));
    if (!queue_) {
        throw Error("ibv_create_cq", last_errno(), device.name());
    }
}

CompletionQueue::~CompletionQueue() {
    // ibv_destroy_cq waits until all events that were read are acknowledged.
    if (unacknowledged_count_ != 0) {
        ibv_ack_cq_events(queue_.get(), unacknowledged_count_);
    }
}

int CompletionQueue::poll(std::span<ibv_wc> completions) {
    const int count = ibv_poll_cq(queue_.get(), static_cast<int>(completions.size()), completions.data());
    if (count < 0) {
        throw Error("ibv_poll_cq", EIO);
    }
    return count;
}

void CompletionQueue::arm() {
    if (const int error_number = ibv_req_notify_cq(queue_.get(), 0); error_number != 0) {
        throw Error("ibv_req_notify_cq", error_number);
    }
}

void CompletionQueue::take_events() {
    ibv_cq* unused_queue = nullptr;
    void* unused_context = nullptr;
    while (ibv_get_cq_event(channel_.get(), &unused_queue, &unused_context) == 0) {
        // ibv_ack_cq_events takes a lock, so one call acknowledges many events.
        if (++unacknowledged_count_ == events_per_ack) {
            ibv_ack_cq_events(queue_.get(), unacknowledged_count_);
            unacknowledged_count_ = 0;
        }
    }
}

QueuePair::QueuePair(const Device& device, CompletionQueue& completion_queue, std::uint32_t transfers_max)
    : device_(&device), psn_(0), transfers_max_(transfers_max) {
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = completion_queue.get();
    attributes.cap.max_send_wr = transfers_max;
    attributes.cap.max_recv_wr = 1;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
    attributes.qp_type = IBV_QPT_RC;
    pair_.reset(ibv_create_qp(device.domain(), &attributes));
    if (!pair_) {
        throw Error("ibv_create_qp", last_errno(), device.name());
    }
    if (getrandom(&psn_, sizeof psn_, 0) != static_cast<ssize_t>(sizeof psn_)) {
        throw Error("getrandom", last_errno());
    }
    psn_ &= 0xffffff; // A packet sequence number has 24 bits.
    requests_.resize(transfers_max);
    scatter_gather_entries_.resize(transfers_max);
}

Endpoint QueuePair::endpoint() const {
    const auto& port = device_->port_attributes();
    return {pair_->qp_num, psn_, device_->gid(), port.lid, convert_mtu_to_bytes(port.active_mtu)};
}

void QueuePair::connect(const Endpoint& peer, std::uint8_t reads_max) {
    const auto modify = [this](ibv_qp_attr& attributes, int mask, const char* state_name) {
        if (const int error_number = ibv_modify_qp(pair_.get(), &attributes, mask | IBV_QP_STATE); error_number != 0) {
            throw Error("ibv_modify_qp", error_number, state_name);
        }
    };
    const auto& port = device_->port_attributes();
    ibv_qp_attr init_attributes{};
    init_attributes.qp_state = IBV_QPS_INIT;
    init_attributes.port_num = device_->port();
    init_attributes.qp_access_flags = 0; // The peer has no access to the memory of this side.
    modify(init_attributes, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");

    ibv_qp_attr rtr_attributes{};
    rtr_attributes.qp_state = IBV_QPS_RTR;
    rtr_attributes.path_mtu = convert_bytes_to_mtu(std::min(peer.mtu_bytes, convert_mtu_to_bytes(port.active_mtu)));
    rtr_attributes.dest_qp_num = peer.qp_number;
    rtr_attributes.rq_psn = peer.psn;
    rtr_attributes.max_dest_rd_atomic = 1;
    rtr_attributes.min_rnr_timer = rnr_timer_code;
    // On Ethernet, or if the peer has no LID, the address of the peer is its GID.
    rtr_attributes.ah_attr.is_global = port.link_layer == IBV_LINK_LAYER_ETHERNET || peer.lid == 0;
    rtr_attributes.ah_attr.dlid = peer.lid;
    rtr_attributes.ah_attr.port_num = device_->port();
    rtr_attributes.ah_attr.grh.dgid = peer.gid;
    rtr_attributes.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_->gid_index());
    rtr_attributes.ah_attr.grh.hop_limit = hop_limit;
    modify(rtr_attributes,
           IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
               IBV_QP_MIN_RNR_TIMER,
           "RTR");

    ibv_qp_attr rts_attributes{};
    rts_attributes.qp_state = IBV_QPS_RTS;
    rts_attributes.timeout = timeout_exponent;
    rts_attributes.retry_cnt = retry_count;
    rts_attributes.rnr_retry = rnr_retry_count;
    rts_attributes.sq_psn = psn_;
    rts_attributes.max_rd_atomic = reads_max;
    modify(rts_attributes,
           IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC, "RTS");
}

int QueuePair::post(std::span<const Transfer> transfers, std::size_t& posted_count) {
    posted_count = 0;
    const std::size_t transfers_count = std::min<std::size_t>(transfers.size(), requests_.size());
    if (transfers_count != transfers.size()) {
        return ENOMEM;
    }
    for (std::size_t index = 0; index < transfers_count; ++index) {
        const Transfer& transfer = transfers[index];
        scatter_gather_entries_[index] = {reinterpret_cast<std::uint64_t>(transfer.local_address),
                                          transfer.length_bytes, transfer.local_key};
        ibv_send_wr& request = requests_[index];
        request = {};
        request.wr_id = transfer.id;
        request.next = index + 1 < transfers_count ? &requests_[index + 1] : nullptr;
        request.sg_list = &scatter_gather_entries_[index];
        request.num_sge = 1;
        request.opcode = transfer.direction == Transfer::Direction::to_peer ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
        request.send_flags = transfer.is_signaled ? static_cast<unsigned>(IBV_SEND_SIGNALED) : 0U;
        request.wr.rdma.remote_addr = transfer.remote_address;
        request.wr.rdma.rkey = transfer.remote_key;
    }
    if (transfers_count == 0) {
        return 0;
    }
    // On an error, the driver sets bad_request to the first request that was not posted.
    ibv_send_wr* bad_request = nullptr;
    const int error_number = ibv_post_send(pair_.get(), requests_.data(), &bad_request);
    posted_count = error_number == 0        ? transfers_count
                   : bad_request == nullptr ? 0
                                            : static_cast<std::size_t>(bad_request - requests_.data());
    return error_number;
}

} // namespace gdrkit::verbs
