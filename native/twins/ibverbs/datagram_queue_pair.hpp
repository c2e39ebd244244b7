// An unreliable-datagram (UD) queue pair. Each pair has one thread, which sends the posted requests, receives the
// datagrams that other pairs send to it, and delivers the completions after random delays. While this thread sleeps, a
// thread of the application can do the same work. A pair receives through one socket for all senders of this machine,
// one for other machines of the TCP fabric, and one for each multicast group that it is attached to. The queue of a
// socket is bounded. If the queue is full, the receiving thread may not have run yet, so the sender tries again for a
// limited time. After that time the sender drops the datagram, as a network would.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ibverbs/address_handle.hpp"
#include "ibverbs/bounce_buffer.hpp"
#include "ibverbs/datagram_frame.hpp"
#include "ibverbs/queue_pair.hpp"

namespace gdrkit::twin::verbs {

class DatagramQueuePair final : public QueuePair, private PolledWork {
public:
    DatagramQueuePair(ibv_qp* public_qp, ProtectionDomain* domain, std::shared_ptr<CompletionQueue> send_cq,
                      std::shared_ptr<CompletionQueue> receive_cq, const ibv_qp_init_attr& init_attr);
    ~DatagramQueuePair() override;

    int open() override;
    void close() override;
    // Carry out ibv_modify_qp. Return 0, EINVAL, or EPERM if the new Q_Key is controlled (its highest bit is set) and
    // the process has no CAP_NET_RAW.
    int modify(const ibv_qp_attr& attr, int attr_mask) override;
    void query(ibv_qp_attr* attr, ibv_qp_init_attr* init_attr) override;
    int post_send(ibv_send_wr* list, ibv_send_wr** bad_wr) override;
    std::uint32_t count_free_send_slots() override;
    int post_receive(const ibv_recv_wr& wr) override;

    // Carry out ibv_attach_mcast and ibv_detach_mcast. Return 0, EINVAL, ENOMEM (the group is full) or another errno.
    int attach(const ibv_gid& group);
    int detach(const ibv_gid& group);
    [[nodiscard]] bool is_in_multicast_group() override;

private:
    using Clock = std::chrono::steady_clock;
    using Lock = std::unique_lock<std::mutex>;

    // A socket that receives the datagrams to the pair itself (`group` is empty), or the datagrams to one multicast
    // group. If `is_remote` is set, the datagrams come from other machines of the TCP fabric.
    struct Receiver {
        Fd socket;
        std::optional<ibv_gid> group;
        bool is_remote = false;
    };
    using Receivers = std::vector<std::shared_ptr<const Receiver>>;

    // A posted send request and its destination.
    struct DatagramWork {
        SendWork send_work;
        std::weak_ptr<const AddressVector> destination;
        std::uint32_t remote_qpn = 0;
        std::uint32_t remote_qkey = 0;
        // State of the attempts to send the request.
        bool has_started = false;       // transmit() was called for the request
        unsigned next_member_index = 0; // the member of the multicast group to which the datagram is sent next
        std::optional<Clock::time_point> blocked_since; // when the queue of the receiver was first found full
    };

    struct DelayedCompletion {
        Completion completion;
        Clock::time_point due_time;
    };
    using DelayedCompletions = std::deque<DelayedCompletion>;

    // State (datagram_queue_pair.cpp, datagram_queue_pair_modify.cpp). A `Lock` parameter must hold mutex_.
    void reset(Lock* lock);
    void enter_error(const Lock& lock, ibv_qp_state error_state);
    void complete_send(const Lock& lock, const SendWork& work, ibv_wc_status status);
    void complete_receive(const Lock& lock, const ReceiveWork& work, ibv_wc wc, bool is_solicited);
    void notify_change(const Lock& lock);
    // Wait until no thread moves a datagram. The thread that moved one then waits in mark_idle until the caller has
    // left this function.
    void wait_until_idle(Lock* lock);
    void mark_idle(Lock* lock);
    std::optional<ReceiveWork> take_receive(const Lock& lock);
    [[nodiscard]] bool can_receive() const {
        return state_ == IBV_QPS_RTR || state_ == IBV_QPS_RTS || state_ == IBV_QPS_SQD || state_ == IBV_QPS_SQE;
    }

    // The work of the thread (datagram_thread.cpp). The functions that flush, send, receive or deliver return whether
    // they did anything.
    void run();
    bool make_progress(Lock* lock);
    void make_progress_in_caller(Lock* lock);
    void send_in_caller(Lock* lock, std::uint64_t posted_bytes);
    void progress_at_poll() override;
    void request_wake_for_responses() override;
    static bool has_send_fault_rule();
    bool deliver_due_completions(const Lock& lock, DelayedCompletions* delayed_completions, CompletionQueue* queue);
    bool flush(const Lock& lock);
    bool send_posted_requests(Lock* lock);
    bool receive_arrived_datagrams(Lock* lock);
    void raise_events(const Lock& lock);
    void wait_for_work(Lock* lock);
    [[nodiscard]] Clock::time_point find_next_deadline() const;

    // Transfer of one datagram (datagram_transfer.cpp). A function without a `Lock` parameter runs without the lock.

    // Send the datagram of a request. Return the status of the request, or nullopt if the queue of the destination is
    // full and the thread must try again.
    std::optional<ibv_wc_status> transmit(DatagramWork* work, std::uint32_t own_qkey);
    // Copy the payload of a request to send_buffer_. Return the status of the request.
    ibv_wc_status gather(const SendWork& work);
    [[nodiscard]] DatagramHeader make_header(const DatagramWork& work, const AddressVector& destination,
                                             std::uint32_t own_qkey) const;
    // Choose the queue pair number and open the sockets that receive (datagram_queue_pair.cpp). Return 0 or an errno.
    int open_receivers();
    // Send the gathered payload to a pair on another machine of the TCP fabric.
    void send_to_other_machine(const DatagramHeader& header);
    // Send the gathered payload to one socket. Return false if its queue is full and the thread must try again.
    bool send_to(const std::string& socket_name, const DatagramHeader& header, DatagramWork* work);
    // Receive one frame. Return false if none has arrived. `header->magic` is 0 if the frame must be dropped.
    bool receive_frame(const Receiver& receiver, DatagramHeader* header);
    // Copy the network header and the payload from receive_buffer_ to the memory of a receive request. Return the
    // status of the request.
    ibv_wc_status scatter(const ReceiveWork& work, const DatagramHeader& header);
    void deliver_frame(Lock* lock, const DatagramHeader& header);

    std::mutex mutex_;
    std::condition_variable state_changed_;
    ibv_qp_state state_ = IBV_QPS_RESET;
    ibv_qp_attr attr_{};
    bool is_closing_ = false;
    bool is_busy_ = false;                  // a thread moves a datagram without the lock
    int idle_waiter_count_ = 0;             // number of threads in wait_until_idle
    bool must_raise_last_wqe_ = false;      // raise IBV_EVENT_QP_LAST_WQE_REACHED after the completions
    bool must_raise_drained_ = false;       // raise IBV_EVENT_SQ_DRAINED when all started requests have completed
    std::deque<DatagramWork> posted_sends_; // the first request may have been attempted already
    std::deque<ReceiveWork> posted_receives_;
    std::shared_ptr<WorkQueueSlots> send_queue_slots_ = std::make_shared<WorkQueueSlots>();
    std::shared_ptr<WorkQueueSlots> receive_queue_slots_ = std::make_shared<WorkQueueSlots>();
    std::uint32_t unsignaled_count_ = 0; // finished unsignaled requests; the next completion frees their slots
    DelayedCompletions delayed_send_completions_, delayed_receive_completions_;
    std::optional<Clock::time_point> retry_at_; // when to try again to send the first request

    // The list is replaced as a whole and never changed, so that the thread can use it without the lock.
    std::shared_ptr<const Receivers> receivers_ = std::make_shared<Receivers>();
    // The receiver of datagrams from other machines; nullptr without a TCP fabric. The pair sends datagrams to other
    // machines through the same socket.
    std::shared_ptr<const Receiver> remote_receiver_;
    Fd qp_num_reservation_; // while it is open, no other queue pair of the device can choose the same number

    // After open(), only the thread that is in make_progress() uses the members from here to stalled_names_.
    Fd send_socket_;
    std::unique_ptr<BounceBuffer> send_buffer_, receive_buffer_;
    // Socket names of receivers whose queue stayed full, because their process is probably stopped. The twin tries only
    // once to send a datagram to such a receiver.
    std::set<std::string> stalled_names_;

    // True if there is something new for the thread since its last turn: a request, a state, another list of sockets.
    // If the thread sleeps, wake_eventfd_ wakes it.
    std::atomic<bool> has_pending_change_{false};
    bool is_asleep_ = false;          // the pair's thread is in wait_for_work()
    bool is_making_progress_ = false; // a thread is in make_progress()
    Clock::time_point wake_time_{};   // when the sleeping thread wakes by itself
    Clock::time_point polled_at_{};   // when a thread of the application last polled
    Fd wake_eventfd_;
    std::thread thread_;
};

} // namespace gdrkit::twin::verbs
