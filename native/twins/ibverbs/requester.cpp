// The requester thread of a queue pair. It dequeues posted send requests, sends them in order (requester_submit.cpp)
// and completes them after a random delay. When the pair is in the error state, the thread flushes the send queue and
// the receive queue. A parameter of the type Lock shows that the caller holds mutex_.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>

#include "ibverbs/connected_queue_pair.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A peer that has not responded for this time is considered stopped. The death of a peer's process is noticed at once.
constexpr std::chrono::seconds peer_timeout{30};
// Largest number of dequeued requests that are not started.
constexpr std::size_t max_queued_sends = 64;

} // namespace

void ConnectedQueuePair::run_requester() {
    Lock lock(mutex_);
    for (;;) {
        // A thread of the application that borrowed requester_state_ must return it first.
        state_changed_.wait(lock, [this] { return !is_requester_borrowed_; });
        // close() may set is_closing_ during the wait above, and does not wake this thread there. So check it here.
        if (is_closing_) {
            abort_requests(lock);
            return;
        }
        has_pending_change_ = false;
        bool has_progress = deliver_due_completions(lock);
        if (state_ == IBV_QPS_RTS || state_ == IBV_QPS_SQD) {
            has_progress |= run_send_turn(&lock);
        } else {
            abort_requests(lock);
            has_progress |= raise_last_wqe_event(lock);
            has_progress |= flush(&lock);
        }
        if (!has_progress) {
            wait_for_work(&lock);
        }
    }
}

// Run one send turn: dequeue requests, submit chunks, handle responses, and complete finished requests. Return whether
// there was progress.
bool ConnectedQueuePair::run_send_turn(Lock* lock) {
    RequesterState& requester = requester_state_;
    if (state_ == IBV_QPS_SQD) {
        // In the state SQD no further request is started.
        requeue_sends(*lock, &requester.queued_sends);
    } else {
        dequeue_sends(*lock);
    }
    if (requester.queued_sends.empty() && requester.started_sends.empty()) {
        mark_idle(*lock);
        if (state_ == IBV_QPS_SQD && must_raise_drained_ && delayed_completions_.empty()) {
            must_raise_drained_ = false;
            raise(IBV_EVENT_SQ_DRAINED);
        }
        return false;
    }
    is_sending_ = true;
    const ibv_qp_attr attr = attr_;
    lock->unlock();
    const bool has_progress = make_progress(attr);
    lock->lock();
    complete_finished(*lock);
    return has_progress;
}

void ConnectedQueuePair::dequeue_sends(const Lock&) {
    Fifo<SendWork>& queued_sends = requester_state_.queued_sends;
    while (queued_sends.size() < max_queued_sends && !posted_sends_.empty()) {
        queued_sends.push_back(std::move(posted_sends_.front()));
        posted_sends_.pop_front();
    }
}

void ConnectedQueuePair::requeue_sends(const Lock&, Fifo<SendWork>* sends) {
    for (; !sends->empty(); sends->pop_back()) {
        posted_sends_.push_front(std::move(sends->back()));
    }
}

// After a send turn, complete the requests that succeeded, and the request that failed if there is one.
void ConnectedQueuePair::complete_finished(const Lock& lock) {
    RequesterState& requester = requester_state_;
    if (state_ != IBV_QPS_RESET) {
        for (; !requester.finished_sends.empty(); requester.finished_sends.pop_front()) {
            count_sent(requester.finished_sends.front());
            complete_after_delay(lock, std::move(requester.finished_sends.front()), IBV_WC_SUCCESS, random_delay_us());
        }
        // If a state change of this pair interrupted a request, the request is flushed later.
        if (requester.first_send_error && *requester.first_send_error != IBV_WC_WR_FLUSH_ERR) {
            const std::uint64_t loss_delay_us =
                *requester.first_send_error == IBV_WC_RETRY_EXC_ERR ? compute_loss_delay_us(attr_) : 0;
            complete_after_delay(lock, std::move(requester.started_sends.front()), *requester.first_send_error,
                                 std::max(loss_delay_us, random_delay_us()));
            requester.started_sends.pop_front();
            push_completions_to_cq(lock);
            enter_error(lock, nullptr);
        }
        push_completions_to_cq(lock);
    } else {
        requester.finished_sends.clear();
    }
    if (requester.queued_sends.empty() && requester.started_sends.empty()) {
        mark_idle(lock);
    }
}

void ConnectedQueuePair::mark_idle(const Lock&) {
    if (is_sending_) {
        is_sending_ = false;
        state_changed_.notify_all();
    }
}

void ConnectedQueuePair::disconnect(const Lock&) {
    if (link_ != nullptr) {
        link_->mark_ended();
    }
    peer_socket_.reset();
    peer_memory_.reset();
    link_.reset();
}

// Stop sending after the pair was closed, or has left RTS and SQD. In the state ERR, unfinished requests go back to the
// send queue, where flush() completes them. In every other state they are discarded.
void ConnectedQueuePair::abort_requests(const Lock& lock) {
    RequesterState& requester = requester_state_;
    disconnect(lock);
    if (state_ == IBV_QPS_ERR) {
        requeue_sends(lock, &requester.queued_sends);
        requeue_sends(lock, &requester.started_sends);
    }
    requester = RequesterState{};
    mark_idle(lock);
}

void ConnectedQueuePair::complete_after_delay(const Lock& lock, SendWork work, ibv_wc_status status,
                                              std::uint64_t delay_us) {
    if (delay_us == 0 && delayed_completions_.empty()) {
        complete_send(lock, work, status);
    } else {
        delayed_completions_.push_back({std::move(work), status, Clock::now() + std::chrono::microseconds(delay_us)});
    }
}

// Complete the requests whose delay has passed. Completions are in order, so a delayed completion also delays the later
// ones. Return whether a completion was due.
bool ConnectedQueuePair::deliver_due_completions(const Lock& lock) {
    bool has_completed_any = false;
    while (!delayed_completions_.empty() && delayed_completions_.front().due_time <= Clock::now()) {
        complete_send(lock, delayed_completions_.front().work, delayed_completions_.front().status);
        delayed_completions_.pop_front();
        has_completed_any = true;
    }
    push_completions_to_cq(lock);
    return has_completed_any;
}

// Flush the send queue and the receive queue after a random delay. Return false if there is nothing to flush, or if
// earlier completions must come first.
bool ConnectedQueuePair::flush(Lock* lock) {
    const auto must_flush = [this] {
        return state_ == IBV_QPS_ERR && delayed_completions_.empty() && incoming_message_count_ == 0 &&
               !(posted_sends_.empty() && posted_receives_.empty());
    };
    if (!must_flush()) {
        return false;
    }
    const std::uint64_t generation_at_start = generation_;
    is_flushing_ = true;
    lock->unlock();
    sleep_random_delay();
    lock->lock();
    is_flushing_ = false;
    state_changed_.notify_all();
    // A reset during the delay has discarded the requests.
    if (generation_at_start != generation_ || !must_flush()) {
        return true;
    }
    for (; !posted_sends_.empty(); posted_sends_.pop_front()) {
        complete_send(*lock, posted_sends_.front(), IBV_WC_WR_FLUSH_ERR);
    }
    push_completions_to_cq(*lock);
    ibv_wc flush_wc{};
    flush_wc.status = IBV_WC_WR_FLUSH_ERR;
    flush_wc.opcode = IBV_WC_RECV;
    for (const ReceiveWork& work : posted_receives_) {
        complete_receive(*lock, work, nullptr, flush_wc, false);
    }
    posted_receives_.clear();
    return true;
}

// A pair with a shared receive queue has no receive requests to flush. Instead it raises IBV_EVENT_QP_LAST_WQE_REACHED
// after its last incoming message. Return whether it raised the event now.
bool ConnectedQueuePair::raise_last_wqe_event(const Lock&) {
    if (!must_raise_last_wqe_ || incoming_message_count_ != 0) {
        return false;
    }
    must_raise_last_wqe_ = false;
    raise(IBV_EVENT_QP_LAST_WQE_REACHED);
    return true;
}

// Wait until the requester thread has work: a response, a posted request, another state, or a deadline.
void ConnectedQueuePair::wait_for_work(Lock* lock) {
    RequesterState& requester = requester_state_;
    if (has_pending_change_) {
        return;
    }
    // If the peer has requests, poll before sleeping, because it will probably respond soon. Otherwise sleep at once:
    // while this thread sleeps, a thread of the application that posts the next request can also send it, without a
    // switch of threads (requester_borrow.cpp).
    if (!requester.chunks_in_flight.empty()) {
        const auto count_new_responses = [&] { return link_->response_count() - requester.handled_count; };
        const std::uint32_t wanted_response_count = get_wake_threshold();
        lock->unlock();
        const bool has_work =
            spin_until([&] { return has_pending_change_ || count_new_responses() >= wanted_response_count; });
        lock->lock();
        if (has_work || has_pending_change_ || count_new_responses() > 0) {
            return;
        }
        if (!link_->request_wake_at(requester.handled_count + wanted_response_count)) {
            return;
        }
    }
    sleep(lock, find_next_deadline());
    if (!requester.chunks_in_flight.empty() && link_->response_count() == requester.handled_count &&
        Clock::now() - requester.last_response_at >= peer_timeout) {
        requester.is_peer_gone = true;
    }
}

ConnectedQueuePair::Clock::time_point ConnectedQueuePair::find_next_deadline() const {
    const RequesterState& requester = requester_state_;
    auto deadline =
        requester.chunks_in_flight.empty() ? Clock::time_point::max() : requester.last_response_at + peer_timeout;
    if (!delayed_completions_.empty()) {
        deadline = std::min(deadline, delayed_completions_.front().due_time);
    }
    if (requester.retry_at) {
        deadline = std::min(deadline, *requester.retry_at);
    }
    return deadline;
}

// Return the number of new responses that wakes this thread: half of the chunks in flight. Waking for each response
// would cost more than handling it.
std::uint32_t ConnectedQueuePair::get_wake_threshold() const {
    return static_cast<std::uint32_t>((requester_state_.chunks_in_flight.size() + 1) / 2);
}

// Sleep until the deadline, a call of notify_change(), a message of the peer, or the poll timeout
// (requester_borrow.cpp).
void ConnectedQueuePair::sleep(Lock* lock, Clock::time_point deadline) {
    const bool has_peer = link_ != nullptr && !requester_state_.is_peer_gone;
    // The kernel ignores an entry with a negative descriptor.
    pollfd poll_fds[3] = {{wake_eventfd_.get(), POLLIN, 0},
                          {poll_timeout_timer_.get(), POLLIN, 0},
                          {has_peer ? link_->wake_fd(peer_socket_.get()) : -1, POLLIN, 0}};
    timespec timeout{};
    if (deadline != Clock::time_point::max()) {
        const auto remaining_ns = std::max<std::int64_t>((deadline - Clock::now()).count(), 0);
        timeout = {remaining_ns / 1'000'000'000, remaining_ns % 1'000'000'000};
    }
    is_requester_asleep_ = true;
    lock->unlock();
    ppoll(poll_fds, 3, deadline == Clock::time_point::max() ? nullptr : &timeout, nullptr);
    lock->lock();
    is_requester_asleep_ = false;
    state_changed_.wait(*lock, [this] { return !is_requester_borrowed_; });
    eventfd_t event_count = 0;
    if ((poll_fds[0].revents & POLLIN) != 0) {
        eventfd_read(wake_eventfd_.get(), &event_count);
    }
    if ((poll_fds[1].revents & POLLIN) != 0) {
        eventfd_read(poll_timeout_timer_.get(), &event_count); // a timer is read like an event descriptor
        is_poll_timeout_armed_ = false;
    }
    if (poll_fds[2].revents != 0 && link_ != nullptr) {
        requester_state_.is_peer_gone |= !link_->consume_wakes(peer_socket_.get());
    }
}

// Add a successful request to the traffic counters of the device. Requests that only change keys send nothing.
void ConnectedQueuePair::count_sent(const SendWork& work) {
    if (changes_keys(work.opcode)) {
        return;
    }
    Traffic::Direction& sent_traffic = context_->device->traffic.sent;
    ++sent_traffic.requests;
    switch (work.opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_SEND_WITH_INV:
        sent_traffic.send_bytes += work.length_bytes;
        break;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        sent_traffic.write_bytes += work.length_bytes;
        break;
    case IBV_WR_RDMA_READ:
        sent_traffic.read_bytes += work.length_bytes;
        break;
    default:
        sent_traffic.atomic_bytes += work.length_bytes;
        break;
    }
}

} // namespace gdrkit::twin::verbs
