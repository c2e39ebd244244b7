// A connected queue pair, reliable (RC, XRC) or unreliable (UC): its work queues, its state, and the threads that carry
// out its requests. If the peer of an unreliable pair does not take a message, the message is lost, but its send
// request completes with success.
//
// The requester thread sends the posted send requests in order, and flushes both queues when the pair is in the error
// state. The acceptor thread accepts connections of peers, and a responder thread serves each connection. All threads
// are joined when the pair is destroyed. A child made by fork() has none of these threads. A child process must
// therefore call exec before it uses verbs.
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
#include "ibverbs/grants.hpp"
#include "ibverbs/link.hpp"
#include "ibverbs/parallel_copy.hpp"
#include "ibverbs/peer_memory.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/region.hpp"
#include "ibverbs/session.hpp"
#include "ibverbs/wire.hpp"
#include "ibverbs/xrc_domain.hpp"
#include "model/fifo.hpp"

namespace gdrkit::twin::verbs {

class ConnectedQueuePair final : public QueuePair, private PolledWork {
public:
    // `xrc_domain` is nullptr except for an XRC receive queue pair.
    ConnectedQueuePair(ibv_qp* public_qp, ProtectionDomain* domain, std::shared_ptr<CompletionQueue> send_cq,
                       std::shared_ptr<CompletionQueue> receive_cq, const ibv_qp_init_attr& init_attr,
                       std::shared_ptr<XrcDomain> xrc_domain)
        : QueuePair(public_qp, domain, std::move(send_cq), std::move(receive_cq), init_attr),
          xrc_domain_(std::move(xrc_domain)) {}
    ~ConnectedQueuePair() override;

    // Choose a random queue pair number that is free at this device's GID, listen on its socket name, and start the
    // threads. Return 0 or an errno.
    int open() override;
    void close() override;
    int modify(const ibv_qp_attr& attr, int attr_mask) override;
    void query(ibv_qp_attr* attr, ibv_qp_init_attr* init_attr) override;
    int post_send(ibv_send_wr* list, ibv_send_wr** bad_wr) override;
    std::uint32_t count_free_send_slots() override;
    int post_receive(const ibv_recv_wr& wr) override;

private:
    using Clock = std::chrono::steady_clock;

    // A peer's connection to this queue pair, and the responder thread that serves it.
    struct Connection {
        std::thread thread;
        Fd socket;
        bool is_remote = false; // the peer is on another machine of the TCP fabric
        // True from the accepted handshake to the end of the connection. The thread accesses memory only while this is
        // true.
        bool is_serving = false;
        bool has_ended = false; // the thread ends and can be joined
        // Value of generation_ at the handshake. A connection of an earlier generation must not complete any request.
        std::uint64_t generation = 0;
        // The grants of regions to the peer; nullptr if the peer cannot access the memory of this process.
        std::shared_ptr<GrantIssuer> grants;
    };

    // An incoming message that is not complete, and the receive request whose memory gets its payload.
    struct IncomingMessage {
        ReceiveWork work;
        // The shared receive queue that the request comes from; nullptr if it is the pair's own queue.
        std::shared_ptr<SharedReceiveQueue> shared_queue;
        bool is_active = false; // false: no message is incomplete, and the other members have no meaning
        std::uint64_t message_bytes = 0;
        std::uint64_t arrived_bytes = 0;
        // The completion of the receive request, once the message has arrived or failed. It is delivered after the
        // response was published.
        std::optional<ibv_wc> completion;
        bool is_solicited = false;
        // True while further chunks of a dropped message may arrive.
        bool is_dropped = false;
    };

    // A finished send request whose completion is held back by a random delay.
    struct DelayedCompletion {
        SendWork work;
        ibv_wc_status status;
        Clock::time_point due_time;
    };

    // A chunk that was submitted to the peer and has no response yet.
    struct InFlightChunk {
        wire::Request request;
        // Position in the payload ring up to which the response frees the ring.
        std::uint64_t release_mark;
        // Number of pipe pages that the response frees; 0 if the payload went through the payload ring.
        std::uint32_t pipe_pages;
    };

    // Progress of the send queue. Only its owner uses it: the requester thread, or the application's thread that has
    // borrowed it (is_requester_borrowed_).
    struct RequesterState {
        // Send requests that are not started, started (all but the last are completely submitted), and finished. Each
        // list is in posted order.
        Fifo<SendWork> queued_sends, started_sends, finished_sends;
        Fifo<InFlightChunk> chunks_in_flight;
        // Counts of chunks since the connection began: written to the request ring, published to the peer, and answered
        // by responses that were handled. Each chunk is one wire::Request.
        std::uint32_t submitted_count = 0, published_count = 0, handled_count = 0;
        std::uint64_t unpublished_bytes = 0; // payload of the chunks that are submitted and not published
        std::uint32_t pipe_pages_used = 0;   // pages of the pipe that chunks in flight occupy
        // Payloads of the last submitted writes, all in splice_region. One call splices them into the pipe when the
        // writes are published.
        std::vector<iovec> pending_splices;
        std::shared_ptr<Region> splice_region;
        // The region of the last scatter-gather entry. It is cached to avoid a key lookup for the next entry.
        std::shared_ptr<Region> cached_region;
        // True while the last started request has chunks that are not submitted. next_chunk is the next of them.
        bool has_pending_chunk = false;
        wire::Request next_chunk{};
        unsigned rnr_retries_left = 0;
        // True while the last submitted chunk may get a receiver-not-ready (RNR) response. No chunk is submitted before
        // that response has arrived.
        bool may_get_rnr = false;
        // Number of reads and atomic requests that are started and not finished. A fenced request waits until this
        // number is 0.
        unsigned pending_data_response_count = 0;
        // Time at which a chunk that got an RNR response is submitted again.
        std::optional<Clock::time_point> retry_at;
        // Local failure of the last started request. It is reported after all earlier requests have finished.
        std::optional<ibv_wc_status> local_error;
        // Status with which the first started request failed.
        std::optional<ibv_wc_status> first_send_error;
        // Time of the last response, or of the submission that made chunks_in_flight non-empty, whichever is later.
        Clock::time_point last_response_at;
        bool is_peer_gone = false;
        // Time at which a direct copy last checked that the connection is open.
        Clock::time_point last_peer_check_at;
        // Number of bytes that the current send turn (run_send_turn) has copied without the responder.
        std::uint64_t copied_bytes = 0;
    };

    using Lock = std::unique_lock<std::mutex>;

    // State (connected_queue_pair.cpp, connected_queue_pair_modify.cpp). A `Lock` parameter must hold mutex_.

    // Enter the state ERR and shut down all connections. `spared_connection` (may be null) is left open, so that its
    // responder thread can still send the response to the request that failed.
    void enter_error(const Lock& lock, const Connection* spared_connection);
    // Like enter_error, and raise an asynchronous event.
    void fail(const Lock& lock, ibv_event_type event, const Connection* spared_connection);
    void reset(Lock* lock);
    int listen();
    void apply_attributes(const ibv_qp_attr& attr, int attr_mask);
    void complete_send(const Lock& lock, const SendWork& work, ibv_wc_status status);
    void complete_receive(const Lock& lock, const ReceiveWork& work, SharedReceiveQueue* shared_queue, ibv_wc wc,
                          bool is_solicited);
    void drop_completions();
    void raise(ibv_event_type event);
    void push_completions_to_cq(const Lock& lock);
    void shut_down_connections(const Lock& lock, const Connection* spared_connection);
    [[nodiscard]] bool no_connection_serves() const;
    [[nodiscard]] bool can_receive_requests() const {
        return state_ == IBV_QPS_RTR || state_ == IBV_QPS_RTS || state_ == IBV_QPS_SQD;
    }
    // Return whether the peer acknowledges or refuses each message.
    [[nodiscard]] bool is_reliable() const { return type() != IBV_QPT_UC; }
    [[nodiscard]] bool is_expected_peer(const Lock& lock, const wire::ConnectRequest& connect_request) const;
    // Return whether the requester thread must stop sending.
    [[nodiscard]] bool is_interrupted() const {
        return is_closing_ || (state_ != IBV_QPS_RTS && state_ != IBV_QPS_SQD);
    }

    // Wake every thread that waits for a state change, including the requester thread.
    void notify_change(const Lock& lock);

    // Requester (requester.cpp).
    void run_requester();
    bool run_send_turn(Lock* lock);
    void dequeue_sends(const Lock& lock);
    void requeue_sends(const Lock& lock, Fifo<SendWork>* sends);
    void complete_finished(const Lock& lock);
    void abort_requests(const Lock& lock);
    void complete_after_delay(const Lock& lock, SendWork work, ibv_wc_status status, std::uint64_t delay_us);
    bool deliver_due_completions(const Lock& lock);
    bool flush(Lock* lock);
    bool raise_last_wqe_event(const Lock& lock);
    void wait_for_work(Lock* lock);
    [[nodiscard]] Clock::time_point find_next_deadline() const;
    [[nodiscard]] std::uint32_t get_wake_threshold() const;
    void sleep(Lock* lock, Clock::time_point deadline);
    void mark_idle(const Lock& lock);
    void disconnect(const Lock& lock);
    void count_sent(const SendWork& work);

    // Work of the requester in a thread of the application (requester_borrow.cpp).
    bool try_send_in_caller(Lock* lock, std::uint64_t posted_bytes);
    void progress_at_poll() override;
    void request_wake_for_responses() override;
    void run_borrowed_turn(Lock* lock);
    void arm_poll_timeout(const Lock& lock);
    static bool has_fault_rule(ibv_wr_opcode opcode);

    // Functions of the requester that run without the lock (requester_submit.cpp, requester_direct.cpp,
    // requester_splice.cpp, requester_connect.cpp).
    bool make_progress(const ibv_qp_attr& attr);
    bool submit_requests(const ibv_qp_attr& attr);
    bool start_next_send(const ibv_qp_attr& attr);
    void change_keys(const SendWork& work);
    bool must_wait_for_earlier_sends(const SendWork& next_send, FaultSite* site);
    ibv_wc_status prepare_send(const SendWork& work, const ibv_qp_attr& attr);
    bool submit_chunk();
    bool has_grant(const SendWork& work);
    bool must_drain_for_copy(const SendWork& next_send);
    bool is_peer_alive();
    bool copy_directly(const SendWork& work, const ibv_qp_attr& attr);
    bool copy_segment(const SendWork& work, const PeerRange& range, std::uint64_t offset);
    bool copy_requests_together(const SendWork& work, const ibv_qp_attr& attr);
    void finish_copied_request(const PeerRange& range, const ibv_qp_attr& attr);
    void finish_first_started(const ibv_qp_attr& attr);
    static void count_without_fault(ibv_wr_opcode opcode);
    std::optional<int> find_fault_of_landed_request(ibv_wr_opcode opcode, const ibv_qp_attr& attr);
    bool reserve_payload(const SendWork& work, wire::Request* request, std::uint32_t* page_count);
    std::uint32_t count_pages_to_splice(const SendWork& work, const wire::Request& request);
    void publish();
    [[nodiscard]] bool can_queue_splice(const SendWork& work, const wire::Request& request) const;
    void queue_splice(const SendWork& work);
    void flush_splices();
    Region* find_local_region(const ibv_sge& sge, unsigned required_access);
    bool handle_responses(const ibv_qp_attr& attr);
    void handle_response(const wire::Response& response, const ibv_qp_attr& attr);
    ibv_wc_status check_local_access(const SendWork& work);
    ibv_wc_status connect_to_peer(const ibv_qp_attr& attr);
    static int connect_socket(const ibv_qp_attr& attr);
    bool handshake(const ibv_qp_attr& attr);
    ibv_wc_status copy_payload(const SendWork& work, const wire::Request& request, bool to_memory);
    ibv_wc_status splice_payload(const SendWork& work, const wire::Request& request);
    ibv_wc_status choose_connection_lost_status();
    void lose_connection();
    static std::uint64_t compute_loss_delay_us(const ibv_qp_attr& attr);
    bool sleep_unless_interrupted(std::uint64_t time_us);

    // Responder (responder.cpp, responder_receive.cpp, responder_write_batch.cpp).
    void run_acceptor(int listener, bool is_remote);
    void join_ended_connections(const Lock& lock);
    void evict_silent_connection(const Lock& lock);
    void run_responder(Connection* connection);
    std::unique_ptr<Link> accept_handshake(Connection* connection);
    void serve_requests(Connection* connection, Link* link, IncomingMessage* incoming);
    std::optional<std::uint32_t> serve_write_batch(Connection* connection, Link* link,
                                                   std::uint32_t first_request_number, std::uint32_t end_request_number,
                                                   const IncomingMessage& incoming);
    bool serve_request(Connection* connection, Link* link, std::uint32_t request_number, IncomingMessage* incoming);
    wire::Response execute(const wire::Request& request, Link* link, IncomingMessage* incoming,
                           const Connection& connection);
    static RegionError write_payload(const wire::Request& request, std::uint64_t address, Region* region, Link* link);
    wire::Response execute_write(const wire::Request& request, Link* link, IncomingMessage* incoming,
                                 const Connection& connection);
    wire::Response execute_read(const wire::Request& request, BounceBuffer* bounce, const IncomingMessage& incoming,
                                const Connection& connection);
    wire::Response execute_atomic(const wire::Request& request, const IncomingMessage& incoming,
                                  const Connection& connection);
    [[nodiscard]] ProtectionDomain* get_target_domain(const IncomingMessage& incoming) const;
    wire::Response execute_send(const wire::Request& request, const BounceBuffer& bounce, IncomingMessage* incoming);
    wire::Response fail_request(wire::Status status, ibv_event_type event, const Connection& connection);
    wire::Response fail_request(RegionError error, const Connection& connection);
    [[nodiscard]] bool permits(unsigned required_access);
    [[nodiscard]] bool permits(const Lock& lock, unsigned required_access) const;
    std::optional<ReceiveWork> take_receive(const Lock& lock, SharedReceiveQueue* shared_queue);
    bool consume_receive(IncomingMessage* incoming);
    void return_receive(IncomingMessage* incoming, const Connection& connection);
    void drop_message(const wire::Request& request, IncomingMessage* incoming, const Connection& connection);
    RegionError scatter(const IncomingMessage& incoming, const wire::Request& request, const BounceBuffer& bounce);
    static wire::Response finish_receive(const wire::Request& request, IncomingMessage* incoming);
    static wire::Response fail_receive(IncomingMessage* incoming, ibv_wc_status wc_status,
                                       wire::Status response_status);
    void deliver_receive(IncomingMessage* incoming, const Connection& connection);
    wire::Response make_receiver_not_ready_response();
    bool may_serve(const Connection& connection);
    void count_served(const wire::Request& request);

    // Grants (responder_grants.cpp).
    void grant(Region* region, std::uint32_t rkey, const Connection& connection);
    static void close_grants(const Connection& connection);
    void revoke_grants(const Lock& lock);

    const std::shared_ptr<XrcDomain> xrc_domain_;
    std::mutex mutex_;
    std::condition_variable state_changed_;
    ibv_qp_state state_ = IBV_QPS_RESET;
    ibv_qp_attr attr_ = make_initial_attributes();
    // Number of resets. Work that started before a reset must not complete after it.
    std::uint64_t generation_ = 0;
    bool is_closing_ = false;          // close() was called
    bool is_sending_ = false;          // requests were dequeued and are not finished
    bool is_flushing_ = false;         // the requester thread is about to flush both queues
    bool must_raise_last_wqe_ = false; // raise IBV_EVENT_QP_LAST_WQE_REACHED when incoming_message_count_ is 0
    bool must_raise_drained_ = false;  // raise IBV_EVENT_SQ_DRAINED when all started requests have completed
    int incoming_message_count_ = 0;   // number of connections with an incomplete incoming message
    Fifo<SendWork> posted_sends_;
    std::deque<ReceiveWork> posted_receives_;
    std::shared_ptr<WorkQueueSlots> send_queue_slots_ = std::make_shared<WorkQueueSlots>();
    std::shared_ptr<WorkQueueSlots> receive_queue_slots_ = std::make_shared<WorkQueueSlots>();
    // Number of finished unsignaled requests whose send queue slots are still used. The next completion frees the
    // slots.
    std::uint32_t unsignaled_count_ = 0;
    // Completions of send requests that are not pushed yet. All completions of one send turn are pushed together.
    std::vector<Completion> unpushed_completions_;
    std::deque<DelayedCompletion> delayed_completions_;
    // True if the state of the pair has changed since the requester thread last checked it. If that thread sleeps,
    // wake_eventfd_ wakes it.
    std::atomic<bool> has_pending_change_{false};
    bool is_requester_asleep_ = false;
    Fd wake_eventfd_;

    // While the requester thread sleeps, a thread of the application may borrow requester_state_ and do the work itself
    // (requester_borrow.cpp). The requester thread waits until the borrower has returned it.
    RequesterState requester_state_;
    bool is_requester_borrowed_ = false;
    // True if a thread of the application has sent requests that have no response yet. Polling the completion queue
    // handles their responses.
    std::atomic<bool> awaits_poll_{false};
    // Wakes the requester thread, so that it takes over requests whose completion queue is not polled.
    Fd poll_timeout_timer_;
    bool is_poll_timeout_armed_ = false;
    // The connection to the peer. Only the owner of requester_state_ uses and closes the socket. Other threads may shut
    // it down while they hold the lock.
    Fd peer_socket_;
    std::unique_ptr<Link> link_;
    // The memory of the peer's process; nullptr if this process cannot access it. Only the owner of
    // requester_state_ uses this member.
    std::unique_ptr<PeerMemory> peer_memory_;
    ParallelCopy parallel_copy_;    // polling threads take part in it
    Fd listener_, remote_listener_; // for peers on this machine, and on other machines of the TCP fabric
    std::list<Connection> connections_;
    std::thread requester_thread_;
    std::thread acceptor_thread_, remote_acceptor_thread_;
};

} // namespace gdrkit::twin::verbs
