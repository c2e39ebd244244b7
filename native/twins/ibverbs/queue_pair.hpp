// A reliable-connected queue pair: its work queues, its state, and the threads that carry its requests.
//
// One thread of its own (the requester) takes send requests in order, and flushes both queues when the pair is in
// error. A second accepts connections of peers, and each connection is served by a thread (the responder). All of them
// are joined when the pair is destroyed. Children of fork have none of these threads: a process that uses verbs must be
// spawned.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ibverbs/bounce.hpp"
#include "ibverbs/completion.hpp"
#include "ibverbs/protection_domain.hpp"
#include "ibverbs/region.hpp"
#include "ibverbs/wire.hpp"

namespace gdrkit::twin::verbs {

struct SendWork {
    std::uint64_t wr_id = 0;
    ibv_wr_opcode opcode{};
    bool signaled = false;
    bool solicited = false;
    bool is_inline = false;
    std::uint32_t immediate = 0;
    std::uint64_t remote_address = 0;
    std::uint32_t rkey = 0;
    std::uint64_t compare_or_add = 0;
    std::uint64_t swap = 0;
    std::uint64_t length_bytes = 0;
    std::vector<ibv_sge> pieces;
    // With is_inline: the bytes themselves, taken when the request was posted.
    std::vector<std::byte> data;
};

struct ReceiveWork {
    std::uint64_t wr_id = 0;
    std::uint64_t length_bytes = 0;
    std::vector<ibv_sge> pieces;
};

class QueuePair {
public:
    QueuePair(ibv_qp* abi, ProtectionDomain* domain, std::shared_ptr<CompletionQueue> send_queue,
              std::shared_ptr<CompletionQueue> receive_queue, const ibv_qp_init_attr& init);
    ~QueuePair();
    QueuePair(const QueuePair&) = delete;
    QueuePair& operator=(const QueuePair&) = delete;

    // Draws a number that nobody has at this device's GID, by listening at its name, and starts the threads. 0 or an
    // errno.
    int open();
    // Ends the threads; nothing of the pair touches memory afterwards.
    void close();

    int modify(const ibv_qp_attr& attr, int attr_mask);
    void query(ibv_qp_attr* attr, ibv_qp_init_attr* init);
    // 0, EINVAL or ENOMEM (no place left).
    int post_send(const ibv_send_wr& wr);
    int post_receive(const ibv_recv_wr& wr);

    [[nodiscard]] std::uint32_t number() const { return number_; }

    const std::shared_ptr<EventAccount> async_events = std::make_shared<EventAccount>();

private:
    struct Connection {
        std::thread thread;
        Fd socket;
        // Between its welcome and its end a connection may touch memory.
        bool serving = false;
        bool ended = false;
        // Of the queue pair when it was welcomed.
        std::uint64_t generation = 0;
    };

    // A receive that a message is being written to, and how far.
    struct Arriving {
        ReceiveWork work;
        bool active = false;
        std::uint64_t message_bytes = 0;
        std::uint64_t arrived_bytes = 0;
    };

    using Lock = std::unique_lock<std::mutex>;

    // State (queue_pair.cpp, queue_pair_modify.cpp). Where a Lock is passed it is held.
    void enter_error(const Lock& lock, const Connection* sparing);
    void fail(const Lock& lock, ibv_event_type event, const Connection* sparing);
    void reset(Lock* lock);
    void apply(const ibv_qp_attr& attr, int attr_mask);
    void complete_send(const Lock& lock, const SendWork& work, ibv_wc_status status);
    void complete_receive(const Lock& lock, const ReceiveWork& work, ibv_wc wc, bool solicited);
    void push(const Lock& lock, CompletionQueue* queue, const Completion& completion);
    void cut_connections(const Lock& lock, const Connection* sparing);
    [[nodiscard]] bool nobody_serves() const;
    [[nodiscard]] bool receives_requests() const {
        return state_ == IBV_QPS_RTR || state_ == IBV_QPS_RTS || state_ == IBV_QPS_SQD;
    }
    [[nodiscard]] bool interrupted() const { return closing_ || (state_ != IBV_QPS_RTS && state_ != IBV_QPS_SQD); }

    // Requester (requester.cpp).
    void run_requester();
    void flush(Lock* lock);
    void send_one(Lock* lock);
    ibv_wc_status carry_out(const SendWork& work);
    [[nodiscard]] ibv_wc_status check_locally(const SendWork& work) const;
    ibv_wc_status connect_to_peer(const ibv_qp_attr& attr);
    bool introduce(int socket, const ibv_qp_attr& attr);
    ibv_wc_status exchange_chunk(const SendWork& work, const wire::Request& request, const ibv_qp_attr& attr);
    ibv_wc_status transfer(const wire::Request& request, wire::Response* response);
    ibv_wc_status move_local(const SendWork& work, std::uint64_t offset, std::size_t size, bool to_memory);
    ibv_wc_status lost();
    bool wait_unless_interrupted(std::uint64_t time_us);
    void count_sent(const SendWork& work);

    // Responder (responder.cpp).
    void run_acceptor();
    void join_ended(const Lock& lock);
    void make_room(const Lock& lock);
    void run_responder(Connection* own);
    bool welcome(Connection* own);
    bool serve_one(Connection* own, Bounce* bounce, Arriving* arriving);
    wire::Response answer(const wire::Request& request, Bounce* bounce, Arriving* arriving, const Connection& own);
    wire::Response answer_write(const wire::Request& request, const Bounce& bounce, Arriving* arriving,
                                const Connection& own);
    wire::Response answer_read(const wire::Request& request, Bounce* bounce, const Connection& own);
    wire::Response answer_atomic(const wire::Request& request, Bounce* bounce, const Connection& own);
    wire::Response answer_send(const wire::Request& request, const Bounce& bounce, Arriving* arriving,
                               const Connection& own);
    wire::Response refuse(wire::Answer answer, ibv_event_type event, const Connection& own);
    wire::Response refuse(RegionError error, const Connection& own);
    [[nodiscard]] bool permits(unsigned access);
    bool take_receive(Arriving* arriving);
    void give_back(Arriving* arriving, const Connection& own);
    RegionError scatter(const ReceiveWork& work, std::uint64_t offset, const Bounce& bounce, std::size_t size);
    wire::Response finish_receive(const wire::Request& request, Arriving* arriving, const Connection& own);
    wire::Response fail_receive(Arriving* arriving, ibv_wc_status status, wire::Answer answer, const Connection& own);
    wire::Response not_ready();
    bool still_serving(const Connection& own);
    void count_served(const wire::Request& request);

    ibv_qp* const abi_;
    ProtectionDomain* const domain_;
    Context* const context_;
    const std::shared_ptr<CompletionQueue> send_queue_;
    const std::shared_ptr<CompletionQueue> receive_queue_;
    const ibv_qp_init_attr init_;
    std::uint32_t number_ = 0;

    std::mutex mutex_;
    std::condition_variable changed_;
    ibv_qp_state state_ = IBV_QPS_RESET;
    ibv_qp_attr attr_{};
    // Counts resets: work that began before one must not complete after it.
    std::uint64_t generation_ = 0;
    bool closing_ = false;
    bool sending_ = false;
    bool flushing_ = false;
    bool drain_event_wanted_ = false;
    int arriving_count_ = 0;
    std::deque<SendWork> sends_;
    std::deque<ReceiveWork> receives_;
    std::shared_ptr<Slots> send_slots_ = std::make_shared<Slots>();
    std::shared_ptr<Slots> receive_slots_ = std::make_shared<Slots>();
    // Places of unsignaled requests, freed with the next completion.
    std::uint32_t silent_ = 0;

    std::unique_ptr<Bounce> bounce_;
    // The connection to the peer. Only the requester uses and closes it, others may shut it down under the lock.
    Fd peer_;
    Fd listener_;
    std::list<Connection> connections_;
    std::thread requester_;
    std::thread acceptor_;
};

struct QueuePairHandle {
    // The extended structure begins with the ordinary one.
    ibv_qp_ex abi{};
    std::shared_ptr<QueuePair> model;
};

inline QueuePairHandle* find_pair(ibv_qp* qp) {
    return reinterpret_cast<QueuePairHandle*>(qp);
}

// For ibv_ack_async_event.
void acknowledge_async(ibv_qp* qp);

} // namespace gdrkit::twin::verbs
