// Opens and closes datagram queue pairs, posts requests, queues completions, and attaches pairs to multicast groups.

#include "ibverbs/datagram_queue_pair.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <system_error>

#include "ibverbs/handle.hpp"
#include "ibverbs/wire.hpp"
#include "model/config.hpp"
#include "model/fabric.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Check a send request. Return 0, EINVAL or EOPNOTSUPP. An RDMA or atomic request is invalid for this type of queue
// pair (InfiniBand specification, table of the operations of each transport).
int check_send(const ibv_send_wr& wr, const ibv_qp_cap& cap) {
    if (!is_valid_sge_list(wr.sg_list, wr.num_sge, cap.max_send_sge) || is_atomic(wr.opcode) ||
        wr.opcode == IBV_WR_RDMA_READ || wr.opcode == IBV_WR_RDMA_WRITE || wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        return EINVAL;
    }
    if (wr.opcode != IBV_WR_SEND && wr.opcode != IBV_WR_SEND_WITH_IMM) {
        return EOPNOTSUPP;
    }
    const bool is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
    // A fence is invalid, because it waits for reads, and only reliable connections have reads.
    const bool is_valid = (wr.send_flags & ~(IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE)) == 0 &&
                          (!is_inline || count_total_bytes(wr.sg_list, wr.num_sge) <= cap.max_inline_data) &&
                          wr.wr.ud.remote_qpn <= multicast_qpn && is_alive("ibv_ah", wr.wr.ud.ah);
    return is_valid ? 0 : EINVAL;
}

} // namespace

DatagramQueuePair::DatagramQueuePair(ibv_qp* public_qp, ProtectionDomain* domain,
                                     std::shared_ptr<CompletionQueue> send_cq,
                                     std::shared_ptr<CompletionQueue> receive_cq, const ibv_qp_init_attr& init_attr)
    : QueuePair(public_qp, domain, std::move(send_cq), std::move(receive_cq), init_attr) {
    attr_ = make_initial_attributes();
}

DatagramQueuePair::~DatagramQueuePair() {
    close();
}

int DatagramQueuePair::open() {
    wake_eventfd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    send_socket_ = Fd(open_datagram_sender());
    send_buffer_ = BounceBuffer::make(max_datagram_bytes);
    receive_buffer_ = BounceBuffer::make(grh_bytes + max_datagram_bytes);
    if (!wake_eventfd_ || !send_socket_ || send_buffer_ == nullptr || receive_buffer_ == nullptr) {
        return errno;
    }
    if (const int error = open_receivers(); error != 0) {
        return error;
    }
    try {
        thread_ = start_signal_blocking_thread([this] { run(); });
        send_cq_->add_work(this);
        if (receive_cq_ != send_cq_) {
            receive_cq_->add_work(this);
        }
    } catch (const std::system_error& error) {
        close();
        return error.code().value();
    }
    return 0;
}

// Choose a random queue pair number that is free at this device's GID, and open the sockets that receive its datagrams.
// On the TCP fabric, the low 16 bits of the number are the UDP port for datagrams from other machines.
int DatagramQueuePair::open_receivers() {
    const ibv_gid& gid = context_->device->gid;
    int reservation_fd = -EADDRINUSE;
    while (reservation_fd == -EADDRINUSE) {
        // The numbers 0 and 1 are the special queue pairs of a port, and 0xffffff means multicast.
        qp_num_ = 2 + static_cast<std::uint32_t>(random_u64() % (multicast_qpn - 3));
        if (!config().fabric_addresses.empty()) {
            std::uint16_t udp_port = 0;
            const int socket_fd = open_fabric_receiver(make_fabric_address(gid), &udp_port);
            if (socket_fd < 0) {
                return -socket_fd;
            }
            remote_receiver_ = std::make_shared<Receiver>(Receiver{Fd(socket_fd), std::nullopt, true});
            qp_num_ = static_cast<std::uint32_t>(random_u64() % 0xff) << 16 | udp_port;
        }
        reservation_fd = reserve_name(wire::make_socket_name(gid, qp_num_));
    }
    if (reservation_fd < 0) {
        return -reservation_fd;
    }
    qp_num_reservation_ = Fd(reservation_fd);
    const int socket_fd = open_datagram_receiver(make_datagram_socket_name(gid, qp_num_));
    if (socket_fd < 0) {
        return -socket_fd;
    }
    Receivers receivers{std::make_shared<Receiver>(Receiver{Fd(socket_fd), std::nullopt, false})};
    if (remote_receiver_ != nullptr) {
        receivers.push_back(remote_receiver_);
    }
    receivers_ = std::make_shared<Receivers>(std::move(receivers));
    return 0;
}

void DatagramQueuePair::close() {
    send_cq_->remove_work(this);
    receive_cq_->remove_work(this);
    {
        Lock lock(mutex_);
        is_closing_ = true;
        notify_change(lock);
    }
    if (thread_.joinable()) {
        thread_.join();
    }
    receivers_ = std::make_shared<Receivers>();
    remote_receiver_.reset();
    qp_num_reservation_.reset();
    send_cq_->drop_completions_of(qp_num_);
    receive_cq_->drop_completions_of(qp_num_);
}

int DatagramQueuePair::post_send(ibv_send_wr* list, ibv_send_wr** bad_wr) {
    Lock lock(mutex_);
    int error = state_ == IBV_QPS_RESET || state_ == IBV_QPS_INIT || state_ == IBV_QPS_RTR ? EINVAL : 0;
    std::uint64_t posted_bytes = 0;
    ibv_send_wr* wr = list;
    for (; wr != nullptr && error == 0; wr = wr->next) {
        error = check_send(*wr, init_attr_.cap);
        if (error == 0 && send_queue_slots_->used_count >= init_attr_.cap.max_send_wr) {
            error = ENOMEM;
        }
        if (error != 0) {
            break;
        }
        DatagramWork work;
        work.send_work = to_send_work(*wr, init_attr_.sq_sig_all != 0, count_total_bytes(wr->sg_list, wr->num_sge));
        work.destination = get_address_handle(wr->wr.ud.ah)->impl;
        work.remote_qpn = wr->wr.ud.remote_qpn;
        work.remote_qkey = wr->wr.ud.remote_qkey;
        posted_bytes += work.send_work.length_bytes;
        ++send_queue_slots_->used_count;
        posted_sends_.push_back(std::move(work));
    }
    if (error != 0) {
        *bad_wr = wr;
    }
    send_in_caller(&lock, posted_bytes);
    return error;
}

std::uint32_t DatagramQueuePair::count_free_send_slots() {
    Lock lock(mutex_);
    return init_attr_.cap.max_send_wr - send_queue_slots_->used_count;
}

int DatagramQueuePair::post_receive(const ibv_recv_wr& wr) {
    // A pair with a shared receive queue has no receive queue of its own.
    if (shared_receive_queue_ != nullptr || !is_valid_sge_list(wr.sg_list, wr.num_sge, init_attr_.cap.max_recv_sge)) {
        return EINVAL;
    }
    Lock lock(mutex_);
    if (state_ == IBV_QPS_RESET) {
        return EINVAL;
    }
    if (receive_queue_slots_->used_count >= init_attr_.cap.max_recv_wr) {
        return ENOMEM;
    }
    ++receive_queue_slots_->used_count;
    posted_receives_.push_back(to_receive_work(wr));
    // The thread needs a receive request only when a datagram arrives, and the datagram wakes it. So wake the thread
    // here only in the error state, in which it must flush this request.
    if (state_ == IBV_QPS_ERR) {
        notify_change(lock);
    }
    return 0;
}

void DatagramQueuePair::complete_send(const Lock&, const SendWork& work, ibv_wc_status status) {
    if (status == IBV_WC_SUCCESS && !work.is_signaled) {
        ++unsignaled_count_;
        return;
    }
    Completion completion;
    completion.wc.wr_id = work.wr_id;
    completion.wc.status = status;
    completion.wc.opcode = IBV_WC_SEND;
    completion.wc.byte_len = static_cast<std::uint32_t>(work.length_bytes);
    completion.wc.qp_num = qp_num_;
    completion.work_queue_slots = send_queue_slots_;
    completion.freed_slot_count = 1 + unsignaled_count_;
    unsignaled_count_ = 0;
    delayed_send_completions_.push_back(
        {std::move(completion), Clock::now() + std::chrono::microseconds(random_delay_us())});
}

void DatagramQueuePair::complete_receive(const Lock&, const ReceiveWork& work, ibv_wc wc, bool is_solicited) {
    Completion completion;
    completion.wc = wc;
    completion.wc.wr_id = work.wr_id;
    completion.wc.qp_num = qp_num_;
    completion.is_solicited = is_solicited;
    completion.work_queue_slots =
        shared_receive_queue_ != nullptr ? shared_receive_queue_->slots() : receive_queue_slots_;
    completion.freed_slot_count = 1;
    delayed_receive_completions_.push_back(
        {std::move(completion), Clock::now() + std::chrono::microseconds(random_delay_us())});
}

std::optional<ReceiveWork> DatagramQueuePair::take_receive(const Lock&) {
    if (shared_receive_queue_ != nullptr) {
        return shared_receive_queue_->take();
    }
    if (posted_receives_.empty()) {
        return std::nullopt;
    }
    std::optional<ReceiveWork> work(std::move(posted_receives_.front()));
    posted_receives_.pop_front();
    return work;
}

void DatagramQueuePair::notify_change(const Lock&) {
    has_pending_change_ = true;
    if (is_asleep_) {
        is_asleep_ = false;
        eventfd_write(wake_eventfd_.get(), 1);
    }
}

void DatagramQueuePair::wait_until_idle(Lock* lock) {
    ++idle_waiter_count_;
    state_changed_.wait(*lock, [this] { return !is_busy_; });
    --idle_waiter_count_;
    state_changed_.notify_all();
}

void DatagramQueuePair::mark_idle(Lock* lock) {
    is_busy_ = false;
    if (idle_waiter_count_ > 0) {
        state_changed_.notify_all();
        state_changed_.wait(*lock, [this] { return idle_waiter_count_ == 0; });
    }
}

int DatagramQueuePair::attach(const ibv_gid& group) {
    Lock lock(mutex_);
    const auto receives_group = [&](const auto& receiver) {
        return receiver->group && is_same_gid(*receiver->group, group);
    };
    if (std::any_of(receivers_->begin(), receivers_->end(), receives_group)) {
        return 0;
    }
    auto receiver = std::make_shared<Receiver>();
    receiver->group = group;
    // Each member of a group has an index, and the index is in the name of its socket. Take the first free index.
    int socket_fd = -EADDRINUSE;
    for (unsigned member_index = 0; member_index < max_multicast_members && socket_fd == -EADDRINUSE; ++member_index) {
        socket_fd = open_datagram_receiver(make_multicast_socket_name(group, member_index));
    }
    if (socket_fd < 0) {
        return socket_fd == -EADDRINUSE ? ENOMEM : -socket_fd;
    }
    receiver->socket = Fd(socket_fd);
    auto receivers = std::make_shared<Receivers>(*receivers_);
    receivers->push_back(std::move(receiver));
    receivers_ = std::move(receivers);
    notify_change(lock);
    return 0;
}

int DatagramQueuePair::detach(const ibv_gid& group) {
    Lock lock(mutex_);
    auto receivers = std::make_shared<Receivers>(*receivers_);
    const auto receiver_to_remove = std::find_if(receivers->begin(), receivers->end(), [&](const auto& receiver) {
        return receiver->group && is_same_gid(*receiver->group, group);
    });
    if (receiver_to_remove == receivers->end()) {
        return EINVAL;
    }
    receivers->erase(receiver_to_remove);
    receivers_ = std::move(receivers);
    notify_change(lock);
    // Wait, so that no datagram to the group is delivered after the call has returned.
    wait_until_idle(&lock);
    return 0;
}

bool DatagramQueuePair::is_in_multicast_group() {
    Lock lock(mutex_);
    return std::any_of(receivers_->begin(), receivers_->end(),
                       [](const auto& receiver) { return receiver->group.has_value(); });
}

} // namespace gdrkit::twin::verbs
