// Implements the queue pair of an rsocket, its registered buffers, and the wait for completions and connection events.

#include <fcntl.h>

#include <utility>

#include "rdmacm/rsocket.hpp"

namespace gdrkit::twin::rdmacm {

RdmaSocket::~RdmaSocket() {
    if (id_ != nullptr) {
        destroy_queue_pair();
        rdma_destroy_id(id_);
    }
    if (channel_ != nullptr) {
        rdma_destroy_event_channel(channel_);
    }
}

// Create the queue pair and its completion queue. Sends and receives share the completion queue and its channel, so
// that a thread can wait for both at one descriptor.
int RdmaSocket::create_qp_and_cq() {
    ibv_qp_init_attr attributes{};
    attributes.cap.max_send_wr = sizes_.send_slot_count + sizes_.control_send_count;
    attributes.cap.max_recv_wr = sizes_.receive_slot_count;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
    attributes.qp_type = sizes_.type;
    attributes.sq_sig_all = 1;
    const auto cq_entry_count = static_cast<int>(attributes.cap.max_send_wr + attributes.cap.max_recv_wr);
    id_->recv_cq_channel = ibv_create_comp_channel(id_->verbs);
    id_->recv_cq = id_->recv_cq_channel == nullptr
                       ? nullptr
                       : ibv_create_cq(id_->verbs, cq_entry_count, nullptr, id_->recv_cq_channel, 0);
    if (id_->recv_cq == nullptr) {
        return errno;
    }
    fcntl(id_->recv_cq_channel->fd, F_SETFL, O_NONBLOCK);
    attributes.send_cq = attributes.recv_cq = id_->recv_cq;
    return rdma_create_qp(id_, nullptr, &attributes) == 0 ? 0 : errno;
}

int RdmaSocket::make_queue_pair() {
    if (const int error = create_qp_and_cq(); error != 0) {
        return error;
    }
    receive_memory_.resize(sizes_.receive_slot_count * sizes_.receive_slot_bytes);
    send_memory_.resize(sizes_.send_slot_count * sizes_.send_slot_bytes);
    receive_mr_ = ibv_reg_mr(id_->pd, receive_memory_.data(), receive_memory_.size(), IBV_ACCESS_LOCAL_WRITE);
    send_mr_ = ibv_reg_mr(id_->pd, send_memory_.data(), send_memory_.size(), IBV_ACCESS_LOCAL_WRITE);
    if (receive_mr_ == nullptr || send_mr_ == nullptr) {
        return errno;
    }
    for (unsigned slot = 0; slot < sizes_.receive_slot_count; ++slot) {
        if (const int error = post_receive(slot); error != 0) {
            return error;
        }
    }
    for (unsigned slot = 0; slot < sizes_.send_slot_count; ++slot) {
        free_send_slots_.push_back(slot);
    }
    return 0;
}

void RdmaSocket::destroy_queue_pair() {
    rdma_destroy_qp(id_);
    for (ibv_mr** mr : {&receive_mr_, &send_mr_}) {
        if (*mr != nullptr) {
            ibv_dereg_mr(std::exchange(*mr, nullptr));
        }
    }
}

int RdmaSocket::post_receive(unsigned slot) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(get_receive_slot(slot)),
                static_cast<std::uint32_t>(sizes_.receive_slot_bytes), receive_mr_->lkey};
    ibv_recv_wr request{receive_mark | slot, nullptr, &sge, 1};
    ibv_recv_wr* bad_request = nullptr;
    return ibv_post_recv(id_->qp, &request, &bad_request);
}

int RdmaSocket::post_slot(unsigned slot, std::size_t size_bytes, ibv_send_wr* request) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(get_send_slot(slot)), static_cast<std::uint32_t>(size_bytes),
                send_mr_->lkey};
    request->wr_id = slot;
    request->sg_list = &sge;
    request->num_sge = 1;
    ibv_send_wr* bad_request = nullptr;
    const int error = ibv_post_send(id_->qp, request, &bad_request);
    if (error != 0) {
        free_send_slots_.push_back(slot);
    }
    return error;
}

unsigned RdmaSocket::take_send_slot() {
    const unsigned slot = free_send_slots_.back();
    free_send_slots_.pop_back();
    return slot;
}

void RdmaSocket::arm() {
    SocketLock lock(mutex_);
    if (id_->recv_cq != nullptr) {
        ibv_req_notify_cq(id_->recv_cq, 0);
    }
}

void RdmaSocket::drain_notifications() {
    SocketLock lock(mutex_);
    ibv_cq* queue = nullptr;
    void* context = nullptr;
    while (id_->recv_cq_channel != nullptr && ibv_get_cq_event(id_->recv_cq_channel, &queue, &context) == 0) {
        ibv_ack_cq_events(queue, 1);
    }
}

std::vector<int> RdmaSocket::list_wait_descriptors() {
    SocketLock lock(mutex_);
    std::vector<int> descriptors{channel_->fd};
    if (id_->recv_cq_channel != nullptr) {
        descriptors.push_back(id_->recv_cq_channel->fd);
    }
    return descriptors;
}

int RdmaSocket::poll_descriptors() {
    std::vector<pollfd> descriptors;
    for (const int descriptor : list_wait_descriptors()) {
        descriptors.push_back({descriptor, POLLIN, 0});
    }
    const int error = poll(descriptors.data(), descriptors.size(), wake_up_interval_ms) < 0 ? errno : 0;
    drain_notifications();
    return error;
}

} // namespace gdrkit::twin::rdmacm
