// A reliable-connected queue pair: its work queues, its state, and the threads that carry out its requests.
//
// The requester thread sends the posted send requests in order and flushes both queues when the pair is in the error
// state. The acceptor thread accepts connections of peers, and a responder thread serves each connection. All threads
// are joined when the pair is destroyed. A forked child has none of these threads, so a process that uses verbs must be
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

#include "ibverbs/bounce_buffer.hpp"
#include "ibverbs/completion.hpp"
#include "ibverbs/link.hpp"
#include "ibverbs/protection_domain.hpp"
#include "ibverbs/region.hpp"
#include "ibverbs/session.hpp"
#include "ibverbs/wire.hpp"
#include "model/fifo.hpp"

namespace gdrkit::twin::verbs {

// The scatter-gather list of a send request. A list of one entry, which is the usual case, needs no heap memory.
class ScatterGatherList {
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
    ScatterGatherList sges;
    // The payload of an inline request, copied when the request was posted.
    std::vector<std::byte> data;
};

struct ReceiveWork {
    std::uint64_t wr_id = 0;
    std::uint64_t length_bytes = 0;
    std::vector<ibv_sge> sges;
};

class QueuePair {
public:
    QueuePair(ibv_qp* abi, ProtectionDomain* domain, std::shared_ptr<CompletionQueue> send_queue,
              std::shared_ptr<CompletionQueue> receive_queue, const ibv_qp_init_attr& init);
    ~QueuePair();
    QueuePair(const QueuePair&) = delete;
    QueuePair& operator=(const QueuePair&) = delete;

    // Draw a queue pair number that is free at this device's GID, listen on its socket name, and start the threads.
    // Return 0 or an errno.
    int open();
    // End the threads. The pair accesses no memory after this call.
    void close();

    int modify(const ibv_qp_attr& attr, int attr_mask);
    void query(ibv_qp_attr* attr, ibv_qp_init_attr* init);
    // Return 0, EINVAL or ENOMEM (queue full). The requests before *bad are posted even if one is refused.
    int post_send(ibv_send_wr* list, ibv_send_wr** bad);
    int post_receive(const ibv_recv_wr& wr);

    [[nodiscard]] std::uint32_t number() const { return number_; }

    const std::shared_ptr<EventCounter> async_events = std::make_shared<EventCounter>();

private:
    using Clock = std::chrono::steady_clock;

    // One peer's connection to this queue pair, served by its own responder thread.
    struct Connection {
        std::thread thread;
        Fd socket;
        // True from the accepted handshake to the end of the connection: only then may it touch memory.
        bool serving = false;
        bool ended = false;
        // Value of generation_ at the handshake. A connection of an earlier generation must not complete anything.
        std::uint64_t generation = 0;
    };

    // The receive request that an incoming message is being written to, and how much of the message has arrived.
    struct IncomingMessage {
        ReceiveWork work;
        bool active = false;
        std::uint64_t message_bytes = 0;
        std::uint64_t arrived_bytes = 0;
    };

    // A finished send request whose completion is held back by a random delay.
    struct DelayedCompletion {
        SendWork work;
        ibv_wc_status status;
        Clock::time_point when;
    };

    // A chunk that was submitted to the peer and has no response yet.
    struct InFlightChunk {
        wire::Request request;
        // The response frees the payload ring up to this mark.
        std::uint64_t release_mark;
        // Number of pipe pages that the response frees; 0 if the payload went through the payload ring.
        std::uint32_t pipe_pages;
    };

    // Progress of the send queue. Only the requester thread reads and writes it.
    struct RequesterState {
        // Send requests in posted order: not started; started (all but the last are completely submitted); finished.
        Fifo<SendWork> queued, started, finished;
        Fifo<InFlightChunk> in_flight;
        // Numbers of requests submitted to and published on this connection, and of responses consumed.
        std::uint32_t submitted = 0, published = 0, responded = 0;
        std::uint64_t unpublished_bytes = 0;
        std::uint32_t pipe_pages_used = 0;
        // Payloads of the most recently submitted writes, all from splice_region. They are spliced into the pipe by one
        // call when the writes are published.
        std::vector<iovec> pending_splices;
        std::shared_ptr<Region> splice_region;
        // The region that the last scatter-gather entry named, to avoid a key lookup for the next one.
        std::shared_ptr<Region> cached_region;
        // True while the last started request has chunks that are not submitted; next_chunk is the next of them.
        bool chunk_pending = false;
        wire::Request next_chunk{};
        unsigned rnr_retries_left = 0;
        // True while the last submitted chunk may get a receiver-not-ready response; no chunk may follow it until then.
        bool rnr_possible = false;
        // Number of reads and atomic requests that are started and not finished; a fenced request waits for 0.
        unsigned data_responses_pending = 0;
        std::optional<Clock::time_point> retry_at;
        // Local failure of the last started request. It is reported after all earlier requests have finished.
        std::optional<ibv_wc_status> local_error;
        // Status with which the first started request failed.
        std::optional<ibv_wc_status> error;
        // Time of the last response, or of the submission that made in_flight non-empty, whichever is later.
        Clock::time_point last_response;
        bool peer_gone = false;
    };

    using Lock = std::unique_lock<std::mutex>;

    // State (queue_pair.cpp, queue_pair_modify.cpp). A function with a Lock parameter requires that lock to be held.
    void enter_error(const Lock& lock, const Connection* except);
    void fail(const Lock& lock, ibv_event_type event, const Connection* except);
    void reset(Lock* lock);
    void apply(const ibv_qp_attr& attr, int attr_mask);
    void complete_send(const Lock& lock, const SendWork& work, ibv_wc_status status);
    void complete_receive(const Lock& lock, const ReceiveWork& work, ibv_wc wc, bool solicited);
    void push_completions(const Lock& lock);
    void shut_down_connections(const Lock& lock, const Connection* except);
    [[nodiscard]] bool no_connection_serves() const;
    [[nodiscard]] bool receives_requests() const {
        return state_ == IBV_QPS_RTR || state_ == IBV_QPS_RTS || state_ == IBV_QPS_SQD;
    }
    [[nodiscard]] bool interrupted() const { return closing_ || (state_ != IBV_QPS_RTS && state_ != IBV_QPS_SQD); }

    // Wake every thread that waits for a state change, including the requester thread.
    void notify_change(const Lock& lock);

    // Requester (requester.cpp).
    void run_requester();
    bool run_once(Lock* lock);
    void dequeue_sends(const Lock& lock);
    void requeue_sends(const Lock& lock, Fifo<SendWork>* works);
    void complete_finished(const Lock& lock);
    void abort_requests(const Lock& lock);
    void complete_delayed(const Lock& lock, SendWork work, ibv_wc_status status);
    bool deliver_due_completions(const Lock& lock);
    bool flush(Lock* lock);
    void wait_for_work(Lock* lock);
    [[nodiscard]] Clock::time_point next_deadline() const;
    [[nodiscard]] std::uint32_t wake_threshold() const;
    void sleep_for_responses(Clock::time_point until);
    void sleep(pollfd* peer, Clock::time_point until);
    void mark_idle(const Lock& lock);
    void disconnect(const Lock& lock);
    void count_sent(const SendWork& work);

    // Parts of the requester that run without the lock (requester_submit.cpp, requester_splice.cpp,
    // requester_connect.cpp).
    bool make_progress(const ibv_qp_attr& attr);
    bool submit_requests(const ibv_qp_attr& attr);
    bool start_next(const ibv_qp_attr& attr);
    bool must_wait_for_earlier(const SendWork& next, FaultSite* site);
    ibv_wc_status prepare(const SendWork& work, FaultSite* site, const ibv_qp_attr& attr);
    bool submit_chunk();
    bool reserve_payload(const SendWork& work, wire::Request* request, std::uint32_t* pages);
    std::uint32_t pages_to_splice(const SendWork& work, const wire::Request& request);
    void publish();
    [[nodiscard]] bool can_queue_splice(const SendWork& work, const wire::Request& request) const;
    void queue_splice(const SendWork& work);
    void flush_splices();
    Region* local_region(const ibv_sge& sge, unsigned required_access);
    bool handle_responses(const ibv_qp_attr& attr);
    void handle_response(const wire::Response& response, const ibv_qp_attr& attr);
    ibv_wc_status check_local_access(const SendWork& work);
    ibv_wc_status connect_to_peer(const ibv_qp_attr& attr);
    bool handshake(const ibv_qp_attr& attr);
    ibv_wc_status copy_payload(const SendWork& work, const wire::Request& request, bool to_memory);
    ibv_wc_status splice_payload(const SendWork& work, const wire::Request& request);
    ibv_wc_status connection_lost_status();
    bool sleep_unless_interrupted(std::uint64_t time_us);

    // Responder (responder.cpp, responder_receive.cpp, responder_write_batch.cpp).
    void run_acceptor();
    void join_ended_connections(const Lock& lock);
    void evict_silent_connection(const Lock& lock);
    void run_responder(Connection* connection);
    std::unique_ptr<Link> accept_handshake(Connection* connection);
    bool wait_for_request(const Connection& connection, Link* link, std::uint32_t served);
    void serve_requests(Connection* connection, Link* link, IncomingMessage* incoming);
    std::optional<std::uint32_t> serve_write_batch(Connection* connection, Link* link, std::uint32_t first_number,
                                                   std::uint32_t end, const IncomingMessage& incoming);
    bool serve_request(Connection* connection, Link* link, std::uint32_t number, IncomingMessage* incoming);
    wire::Response execute(const wire::Request& request, Link* link, IncomingMessage* incoming,
                           const Connection& connection);
    static RegionError write_payload(const wire::Request& request, Region* region, Link* link);
    wire::Response execute_write(const wire::Request& request, Link* link, IncomingMessage* incoming,
                                 const Connection& connection);
    wire::Response execute_read(const wire::Request& request, BounceBuffer* bounce, const Connection& connection);
    wire::Response execute_atomic(const wire::Request& request, const Connection& connection);
    wire::Response execute_send(const wire::Request& request, const BounceBuffer& bounce, IncomingMessage* incoming,
                                const Connection& connection);
    wire::Response fail_request(wire::Status status, ibv_event_type event, const Connection& connection);
    wire::Response fail_request(RegionError error, const Connection& connection);
    [[nodiscard]] bool permits(unsigned access);
    bool consume_receive(IncomingMessage* incoming);
    void return_receive(IncomingMessage* incoming, const Connection& connection);
    RegionError scatter(const ReceiveWork& work, const wire::Request& request, const BounceBuffer& bounce);
    wire::Response finish_receive(const wire::Request& request, IncomingMessage* incoming,
                                  const Connection& connection);
    wire::Response fail_receive(IncomingMessage* incoming, ibv_wc_status wc_status, wire::Status response_status,
                                const Connection& connection);
    wire::Response receiver_not_ready_response();
    bool may_serve(const Connection& connection);
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
    // Number of resets. Work that started before a reset must not complete after it.
    std::uint64_t generation_ = 0;
    bool closing_ = false;
    bool sending_ = false;
    bool flushing_ = false;
    bool drain_event_wanted_ = false;
    int incoming_count_ = 0;
    Fifo<SendWork> sends_;
    std::deque<ReceiveWork> receives_;
    std::shared_ptr<WorkQueueSlots> send_queue_slots_ = std::make_shared<WorkQueueSlots>();
    std::shared_ptr<WorkQueueSlots> receive_queue_slots_ = std::make_shared<WorkQueueSlots>();
    // Send queue slots of completed unsignaled requests; the next completion frees them.
    std::uint32_t unsignaled_count_ = 0;
    // Completions of sends that are not pushed yet: all of one turn are pushed together.
    std::vector<Completion> unpushed_completions_;
    std::deque<DelayedCompletion> delayed_completions_;
    // Set when something changed since the requester thread last checked. While it sleeps it is woken by wake_eventfd_.
    std::atomic<bool> change_pending_{false};
    bool requester_asleep_ = false;
    Fd wake_eventfd_;

    RequesterState requester_state_;
    // The connection to the peer. Only the requester thread uses and closes it; other threads may shut it down while
    // they hold the lock.
    Fd peer_;
    std::unique_ptr<Link> link_;
    Fd listener_;
    std::list<Connection> connections_;
    std::thread requester_thread_;
    std::thread acceptor_thread_;
};

struct QueuePairHandle {
    // Begins with the ordinary structure.
    ibv_qp_ex abi{};
    std::shared_ptr<QueuePair> model;
};

inline QueuePairHandle* qp_handle_of(ibv_qp* qp) {
    return reinterpret_cast<QueuePairHandle*>(qp);
}

// Acknowledge one event; called by ibv_ack_async_event.
void acknowledge_async(ibv_qp* qp);

} // namespace gdrkit::twin::verbs
