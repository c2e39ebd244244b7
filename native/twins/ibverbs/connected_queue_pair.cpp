// Opens and closes connected queue pairs, moves them to the error state, and pushes their completions.

#include "ibverbs/connected_queue_pair.hpp"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "model/config.hpp"
#include "model/fabric.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::verbs {
namespace {

ibv_wc_opcode get_completion_opcode(ibv_wr_opcode opcode) {
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_WC_FETCH_ADD;
    case IBV_WR_BIND_MW:
        return IBV_WC_BIND_MW;
    case IBV_WR_LOCAL_INV:
        return IBV_WC_LOCAL_INV;
    default:
        return IBV_WC_SEND;
    }
}

void shut_down_socket(const Fd& socket) {
    if (socket) {
        shutdown(socket.get(), SHUT_RDWR);
    }
}

} // namespace

ConnectedQueuePair::~ConnectedQueuePair() {
    close();
}

int ConnectedQueuePair::open() {
    wake_eventfd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    poll_timeout_timer_ = Fd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (!wake_eventfd_ || !poll_timeout_timer_) {
        return errno;
    }
    if (const int error = listen(); error != 0) {
        return error;
    }
    try {
        requester_thread_ = start_signal_blocking_thread([this] { run_requester(); });
        acceptor_thread_ = start_signal_blocking_thread([this] { run_acceptor(listener_.get(), false); });
        if (remote_listener_) {
            remote_acceptor_thread_ =
                start_signal_blocking_thread([this] { run_acceptor(remote_listener_.get(), true); });
        }
        if (send_cq_ != nullptr) {
            send_cq_->add_work(this);
        }
    } catch (const std::system_error& error) {
        close();
        return error.code().value();
    }
    return 0;
}

// Choose a random queue pair number that is free at this device's GID, and listen for peers on this machine. On the TCP
// fabric, the low 16 bits of the number are the port on which the pair listens for peers on other machines.
int ConnectedQueuePair::listen() {
    int listener = -EADDRINUSE;
    while (listener == -EADDRINUSE) {
        // The numbers 0 and 1 are the special queue pairs of a port, and 0xffffff means multicast.
        qp_num_ = 2 + static_cast<std::uint32_t>(random_u64() % (0xfffffe - 2));
        if (!config().fabric_addresses.empty()) {
            std::uint16_t port = 0;
            const int remote_listener = listen_on_fabric(make_fabric_address(context_->device->gid), &port);
            if (remote_listener < 0) {
                return -remote_listener;
            }
            remote_listener_ = Fd(remote_listener);
            // The upper 8 bits are random, but not 0xff, so that the number is never 0xffffff.
            qp_num_ = static_cast<std::uint32_t>(random_u64() % 0xff) << 16 | port;
        }
        listener = listen_on(wire::make_socket_name(context_->device->gid, qp_num_));
    }
    listener_ = Fd(listener < 0 ? -1 : listener);
    return listener < 0 ? -listener : 0;
}

void ConnectedQueuePair::close() {
    if (send_cq_ != nullptr) {
        send_cq_->remove_work(this);
    }
    {
        Lock lock(mutex_);
        is_closing_ = true;
        shut_down_socket(peer_socket_);
        shut_down_socket(listener_);
        shut_down_socket(remote_listener_);
        shut_down_connections(lock, nullptr);
        notify_change(lock);
    }
    if (acceptor_thread_.joinable()) {
        acceptor_thread_.join();
    }
    if (remote_acceptor_thread_.joinable()) {
        remote_acceptor_thread_.join();
    }
    if (requester_thread_.joinable()) {
        requester_thread_.join();
    }
    // The acceptor threads have ended, so no connection is added any more.
    for (Connection& connection : connections_) {
        connection.thread.join();
    }
    connections_.clear();
    listener_.reset();
    remote_listener_.reset();
    drop_completions();
}

void ConnectedQueuePair::raise(ibv_event_type event) {
    if (xrc_domain_ != nullptr) {
        xrc_domain_->raise(qp_num_, event);
    } else {
        context_->raise(public_qp_, event, async_event_counter);
    }
}

void ConnectedQueuePair::drop_completions() {
    for (const auto& completion_queue : {send_cq_, receive_cq_}) {
        if (completion_queue != nullptr) {
            completion_queue->drop_completions_of(qp_num_);
        }
    }
    if (xrc_domain_ != nullptr) {
        xrc_domain_->drop_completions(qp_num_);
    }
}

void ConnectedQueuePair::shut_down_connections(const Lock& lock, const Connection* spared_connection) {
    revoke_grants(lock);
    for (Connection& connection : connections_) {
        if (&connection != spared_connection) {
            shut_down_socket(connection.socket);
        }
    }
}

bool ConnectedQueuePair::no_connection_serves() const {
    return std::none_of(connections_.begin(), connections_.end(),
                        [](const Connection& connection) { return connection.is_serving; });
}

void ConnectedQueuePair::notify_change(const Lock&) {
    state_changed_.notify_all();
    has_pending_change_ = true;
    if (is_requester_asleep_) {
        is_requester_asleep_ = false;
        eventfd_write(wake_eventfd_.get(), 1);
    }
}

void ConnectedQueuePair::enter_error(const Lock& lock, const Connection* spared_connection) {
    if (state_ == IBV_QPS_RESET) {
        return;
    }
    must_raise_last_wqe_ |= shared_receive_queue_ != nullptr && state_ != IBV_QPS_ERR;
    state_ = IBV_QPS_ERR;
    shut_down_socket(peer_socket_);
    shut_down_connections(lock, spared_connection);
    notify_change(lock);
}

void ConnectedQueuePair::fail(const Lock& lock, ibv_event_type event, const Connection* spared_connection) {
    if (state_ != IBV_QPS_ERR && state_ != IBV_QPS_RESET) {
        enter_error(lock, spared_connection);
        raise(event);
    }
}

void ConnectedQueuePair::push_completions_to_cq(const Lock& lock) {
    if (!unpushed_completions_.empty() && !send_cq_->push(unpushed_completions_)) {
        fail(lock, IBV_EVENT_QP_FATAL, nullptr);
    }
    unpushed_completions_.clear();
}

// Queue the completion of a send request for push_completions_to_cq. A successful unsignaled request has no completion;
// the next completion frees its slot.
void ConnectedQueuePair::complete_send(const Lock&, const SendWork& work, ibv_wc_status status) {
    if (status == IBV_WC_SUCCESS && !work.is_signaled) {
        ++unsignaled_count_;
        return;
    }
    Completion completion;
    completion.wc.wr_id = work.wr_id;
    completion.wc.status = status;
    completion.wc.opcode = get_completion_opcode(work.opcode);
    completion.wc.byte_len = static_cast<std::uint32_t>(work.length_bytes);
    completion.wc.qp_num = qp_num_;
    completion.work_queue_slots = send_queue_slots_;
    completion.freed_slot_count = 1 + unsignaled_count_;
    unsignaled_count_ = 0;
    unpushed_completions_.push_back(std::move(completion));
}

void ConnectedQueuePair::complete_receive(const Lock& lock, const ReceiveWork& work, SharedReceiveQueue* shared_queue,
                                          ibv_wc wc, bool is_solicited) {
    Completion completion;
    completion.wc = wc;
    completion.wc.wr_id = work.wr_id;
    completion.wc.qp_num = qp_num_;
    completion.wc.src_qp = attr_.dest_qp_num;
    completion.is_solicited = is_solicited;
    completion.work_queue_slots = shared_queue != nullptr ? shared_queue->slots() : receive_queue_slots_;
    completion.freed_slot_count = 1;
    // Only a shared receive queue of XRC has a completion queue of its own.
    const bool has_own_cq = shared_queue != nullptr && shared_queue->completion_queue() != nullptr;
    CompletionQueue& completion_queue = has_own_cq ? *shared_queue->completion_queue() : *receive_cq_;
    if (!completion_queue.push({&completion, 1})) {
        fail(lock, IBV_EVENT_QP_FATAL, nullptr);
    }
}

} // namespace gdrkit::twin::verbs
