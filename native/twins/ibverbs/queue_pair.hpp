// A reliable-connected queue pair: its work queues, its state, and the threads that carry its requests.
//
// One thread of its own (the requester) takes send requests in order, and flushes both queues when the pair is in
// error. A second accepts connections of peers, and each connection is served by a thread (the responder). All of them
// are joined when the pair is destroyed. Children of fork have none of these threads: a process that uses verbs must be
// spawned.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "ibverbs/bounce.hpp"
#include "ibverbs/completion.hpp"
#include "ibverbs/link.hpp"
#include "ibverbs/protection_domain.hpp"
#include "ibverbs/region.hpp"
#include "ibverbs/session.hpp"
#include "ibverbs/wire.hpp"
#include "model/fifo.hpp"

namespace gdrkit::twin::verbs {

// The memory that a send request names. Nearly all name one piece, which takes no memory of its own.
class Pieces {
public:
    void assign(const ibv_sge* list, std::size_t count) {
        count_ = count;
        if (count == 1) {
            one_ = *list;
        } else {
            many_.assign(list, list + count);
        }
    }
    [[nodiscard]] std::size_t size() const { return count_; }
    [[nodiscard]] const ibv_sge* begin() const { return count_ == 1 ? &one_ : many_.data(); }
    [[nodiscard]] const ibv_sge* end() const { return begin() + count_; }
    [[nodiscard]] const ibv_sge& front() const { return *begin(); }

private:
    ibv_sge one_{};
    std::vector<ibv_sge> many_;
    std::size_t count_ = 0;
};

struct SendWork {
    std::uint64_t wr_id = 0;
    ibv_wr_opcode opcode{};
    bool fenced = false;
    bool signaled = false;
    bool solicited = false;
    bool is_inline = false;
    std::uint32_t immediate = 0;
    std::uint64_t remote_address = 0;
    std::uint32_t rkey = 0;
    std::uint64_t compare_or_add = 0;
    std::uint64_t swap = 0;
    std::uint64_t length_bytes = 0;
    Pieces pieces;
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
    // 0, EINVAL or ENOMEM (no place left). Of a list, what comes before the one that is refused is taken.
    int post_send(ibv_send_wr* list, ibv_send_wr** bad);
    int post_receive(const ibv_recv_wr& wr);

    [[nodiscard]] std::uint32_t number() const { return number_; }

    const std::shared_ptr<EventAccount> async_events = std::make_shared<EventAccount>();

private:
    using Clock = std::chrono::steady_clock;

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

    // A send request whose completion is late.
    struct Due {
        SendWork work;
        ibv_wc_status status;
        Clock::time_point when;
    };

    // A request to the peer that was submitted and not yet answered.
    struct Chunk {
        wire::Request request;
        // Up to where its answer frees shared memory, if it took some.
        std::uint64_t mark;
        // Of the pipe, that its answer frees.
        std::uint32_t pages;
    };

    // What the requester is about. Only its thread looks at this.
    struct Sending {
        // In the order in which they were posted: not begun; begun, of which all but the last are submitted whole;
        // answered.
        Fifo<SendWork> taken, begun, finished;
        Fifo<Chunk> chunks;
        // Requests and answers over this connection.
        std::uint32_t submitted = 0, published = 0, answered = 0;
        std::uint64_t unpublished_bytes = 0;
        std::uint32_t pages_lent = 0;
        // The last of the submitted ones, which are writes out of one region: what they lend goes into the pipe when
        // they are published.
        std::vector<iovec> to_lend;
        std::shared_ptr<Region> lender;
        // The region that a request last named.
        std::shared_ptr<Region> known;
        // Of the last one that was begun, as long as it is not submitted whole: the next part.
        bool open = false;
        wire::Request next{};
        unsigned tries_left = 0;
        // The last that was submitted may find the peer not ready: nothing may follow before that is known.
        bool held = false;
        // Reads and atomic requests that were begun and not yet answered, for who wants a fence.
        unsigned with_data = 0;
        std::optional<Clock::time_point> try_again;
        // The last that was begun failed here; it is the first that failed, once those before it are answered.
        std::optional<ibv_wc_status> stopped;
        // The first that was begun failed.
        std::optional<ibv_wc_status> failed;
        // When the peer last answered, or was asked with nothing to answer before.
        Clock::time_point heard;
        bool hung_up = false;
    };

    using Lock = std::unique_lock<std::mutex>;

    // State (queue_pair.cpp, queue_pair_modify.cpp). Where a Lock is passed it is held.
    void enter_error(const Lock& lock, const Connection* sparing);
    void fail(const Lock& lock, ibv_event_type event, const Connection* sparing);
    void reset(Lock* lock);
    void apply(const ibv_qp_attr& attr, int attr_mask);
    void complete_send(const Lock& lock, const SendWork& work, ibv_wc_status status);
    void complete_receive(const Lock& lock, const ReceiveWork& work, ibv_wc wc, bool solicited);
    void push_completed(const Lock& lock);
    void cut_connections(const Lock& lock, const Connection* sparing);
    [[nodiscard]] bool nobody_serves() const;
    [[nodiscard]] bool receives_requests() const {
        return state_ == IBV_QPS_RTR || state_ == IBV_QPS_RTS || state_ == IBV_QPS_SQD;
    }
    [[nodiscard]] bool interrupted() const { return closing_ || (state_ != IBV_QPS_RTS && state_ != IBV_QPS_SQD); }

    // Whoever waits for a change, and the requester wherever it sleeps.
    void ring(const Lock& lock);

    // Requester (requester.cpp).
    void run_requester();
    bool take_turn(Lock* lock);
    void take_work(const Lock& lock);
    void give_back_work(const Lock& lock, Fifo<SendWork>* works);
    void settle(const Lock& lock);
    void abandon(const Lock& lock);
    void complete_late(const Lock& lock, SendWork work, ibv_wc_status status);
    bool deliver_due(const Lock& lock);
    bool flush(Lock* lock);
    void rest(Lock* lock);
    [[nodiscard]] Clock::time_point time_to_look() const;
    [[nodiscard]] std::uint32_t worth_waking() const;
    void sleep_for_answers(Clock::time_point until);
    void sleep(pollfd* peer, Clock::time_point until);
    void stop_sending(const Lock& lock);
    void hang_up(const Lock& lock);
    void count_sent(const SendWork& work);

    // What the requester does without the lock (requester_work.cpp).
    bool advance(const ibv_qp_attr& attr);
    bool submit(const ibv_qp_attr& attr);
    bool begin_next(const ibv_qp_attr& attr);
    bool must_wait(const SendWork& next, FaultSite* site);
    ibv_wc_status prepare(const SendWork& work, FaultSite* site, const ibv_qp_attr& attr);
    bool submit_chunk();
    bool find_room(const SendWork& work, wire::Request* request, std::uint32_t* pages);
    std::uint32_t pages_to_lend(const SendWork& work, const wire::Request& request);
    void publish();
    [[nodiscard]] bool may_lend_later(const SendWork& work, const wire::Request& request) const;
    void lend_later(const SendWork& work);
    void lend_now();
    Region* own_region(const ibv_sge& piece, unsigned wanted);
    bool reap(const ibv_qp_attr& attr);
    void take_answer(const wire::Response& response, const ibv_qp_attr& attr);
    ibv_wc_status check_locally(const SendWork& work);
    ibv_wc_status connect_to_peer(const ibv_qp_attr& attr);
    bool introduce(const ibv_qp_attr& attr);
    ibv_wc_status move_local(const SendWork& work, const wire::Request& request, bool to_memory);
    ibv_wc_status lend_local(const SendWork& work, const wire::Request& request);
    ibv_wc_status lost();
    bool wait_unless_interrupted(std::uint64_t time_us);

    // Responder (responder.cpp).
    void run_acceptor();
    void join_ended(const Lock& lock);
    void make_room(const Lock& lock);
    void run_responder(Connection* own);
    std::unique_ptr<Link> welcome(Connection* own);
    bool await_request(const Connection& own, Link* link, std::uint32_t served);
    void serve(Connection* own, Link* link, Arriving* arriving);
    std::optional<std::uint32_t> serve_writes(Connection* own, Link* link, std::uint32_t number, std::uint32_t end,
                                              const Arriving& arriving);
    bool serve_one(Connection* own, Link* link, std::uint32_t number, Arriving* arriving);
    wire::Response answer(const wire::Request& request, Link* link, Arriving* arriving, const Connection& own);
    static RegionError land(const wire::Request& request, Region* region, Link* link);
    wire::Response answer_write(const wire::Request& request, Link* link, Arriving* arriving, const Connection& own);
    wire::Response answer_read(const wire::Request& request, Bounce* bounce, const Connection& own);
    wire::Response answer_atomic(const wire::Request& request, const Connection& own);
    wire::Response answer_send(const wire::Request& request, const Bounce& bounce, Arriving* arriving,
                               const Connection& own);
    wire::Response refuse(wire::Answer answer, ibv_event_type event, const Connection& own);
    wire::Response refuse(RegionError error, const Connection& own);
    [[nodiscard]] bool permits(unsigned access);
    bool take_receive(Arriving* arriving);
    void give_back(Arriving* arriving, const Connection& own);
    RegionError scatter(const ReceiveWork& work, const wire::Request& request, const Bounce& bounce);
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
    Fifo<SendWork> sends_;
    std::deque<ReceiveWork> receives_;
    std::shared_ptr<Slots> send_slots_ = std::make_shared<Slots>();
    std::shared_ptr<Slots> receive_slots_ = std::make_shared<Slots>();
    // Places of unsignaled requests, freed with the next completion.
    std::uint32_t silent_ = 0;
    // Sends that completed, until the lock is given up: they go to the queue together.
    std::vector<Completion> completed_;
    std::deque<Due> due_;
    // Something changed since the requester last looked; it sleeps and wants to hear of that by the doorbell.
    std::atomic<bool> news_{false};
    bool asleep_ = false;
    Fd doorbell_;

    Sending sending_work_;
    // The connection to the peer. Only the requester uses and closes it, others may shut it down under the lock.
    Fd peer_;
    std::unique_ptr<Link> link_;
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
