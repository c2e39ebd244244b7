// The requester thread of a queue pair: takes posted send requests, has them sent in order (requester_submit.cpp),
// completes them after a random delay, and flushes both queues when the pair is in the error state.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>

#include "ibverbs/queue_pair.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A stopped peer is given up after this time. The end of a dead peer's process is noticed at once.
constexpr std::chrono::seconds peer_timeout{30};
// Number of posted requests that are dequeued at a time.
constexpr std::size_t max_queued_sends = 64;

} // namespace

void QueuePair::run_requester() {
    Lock lock(mutex_);
    while (!closing_) {
        change_pending_ = false;
        bool moved = deliver_due_completions(lock);
        if (state_ == IBV_QPS_RTS || state_ == IBV_QPS_SQD) {
            moved |= run_once(&lock);
        } else {
            abort_requests(lock);
            moved |= flush(&lock);
        }
        if (!moved) {
            wait_for_work(&lock);
        }
    }
    abort_requests(lock);
}

// Run one turn of sending. Return whether there was progress.
bool QueuePair::run_once(Lock* lock) {
    RequesterState& requester = requester_state_;
    if (state_ == IBV_QPS_SQD) {
        // In SQD no further request is started.
        requeue_sends(*lock, &requester.queued);
    } else {
        dequeue_sends(*lock);
    }
    if (requester.queued.empty() && requester.started.empty()) {
        mark_idle(*lock);
        if (state_ == IBV_QPS_SQD && drain_event_wanted_ && delayed_completions_.empty()) {
            drain_event_wanted_ = false;
            context_->raise(abi_, IBV_EVENT_SQ_DRAINED, async_events);
        }
        return false;
    }
    sending_ = true;
    const ibv_qp_attr attr = attr_;
    lock->unlock();
    const bool moved = make_progress(attr);
    lock->lock();
    complete_finished(*lock);
    return moved;
}

void QueuePair::dequeue_sends(const Lock&) {
    Fifo<SendWork>& taken = requester_state_.queued;
    while (taken.size() < max_queued_sends && !sends_.empty()) {
        taken.push_back(std::move(sends_.front()));
        sends_.pop_front();
    }
}

void QueuePair::requeue_sends(const Lock&, Fifo<SendWork>* works) {
    for (; !works->empty(); works->pop_back()) {
        sends_.push_front(std::move(works->back()));
    }
}

// After a turn, complete the requests that succeeded and the one that failed.
void QueuePair::complete_finished(const Lock& lock) {
    RequesterState& requester = requester_state_;
    if (state_ != IBV_QPS_RESET) {
        for (; !requester.finished.empty(); requester.finished.pop_front()) {
            count_sent(requester.finished.front());
            complete_delayed(lock, std::move(requester.finished.front()), IBV_WC_SUCCESS);
        }
        // A request that this pair's own state change interrupted is flushed later.
        if (requester.error && *requester.error != IBV_WC_WR_FLUSH_ERR) {
            complete_delayed(lock, std::move(requester.started.front()), *requester.error);
            requester.started.pop_front();
            push_completions(lock);
            enter_error(lock, nullptr);
        }
        push_completions(lock);
    } else {
        requester.finished.clear();
    }
    if (requester.queued.empty() && requester.started.empty()) {
        mark_idle(lock);
    }
}

void QueuePair::mark_idle(const Lock&) {
    if (sending_) {
        sending_ = false;
        changed_.notify_all();
    }
}

void QueuePair::disconnect(const Lock&) {
    if (link_ != nullptr) {
        link_->mark_ended();
    }
    peer_.reset();
    link_.reset();
}

// The pair left the sending states: unanswered requests go back to the queue to be flushed, or were discarded by a
// reset.
void QueuePair::abort_requests(const Lock& lock) {
    RequesterState& requester = requester_state_;
    disconnect(lock);
    if (state_ == IBV_QPS_ERR) {
        requeue_sends(lock, &requester.queued);
        requeue_sends(lock, &requester.started);
    }
    requester = RequesterState{};
    mark_idle(lock);
}

void QueuePair::complete_delayed(const Lock& lock, SendWork work, ibv_wc_status status) {
    const std::uint64_t delay_us = random_delay_us();
    if (delay_us == 0 && delayed_completions_.empty()) {
        complete_send(lock, work, status);
    } else {
        delayed_completions_.push_back({std::move(work), status, Clock::now() + std::chrono::microseconds(delay_us)});
    }
}

// Complete the requests whose delay has passed, in order: a delayed completion delays those behind it.
bool QueuePair::deliver_due_completions(const Lock& lock) {
    bool any = false;
    while (!delayed_completions_.empty() && delayed_completions_.front().when <= Clock::now()) {
        complete_send(lock, delayed_completions_.front().work, delayed_completions_.front().status);
        delayed_completions_.pop_front();
        any = true;
    }
    push_completions(lock);
    return any;
}

// Flush both queues after a random delay. Return false if there is nothing to flush or a completion is pending.
bool QueuePair::flush(Lock* lock) {
    const auto to_flush = [this] {
        return state_ == IBV_QPS_ERR && delayed_completions_.empty() && incoming_count_ == 0 &&
               !(sends_.empty() && receives_.empty());
    };
    if (!to_flush()) {
        return false;
    }
    const std::uint64_t generation = generation_;
    flushing_ = true;
    lock->unlock();
    sleep_random_delay();
    lock->lock();
    flushing_ = false;
    changed_.notify_all();
    if (generation != generation_ || !to_flush()) {
        return true;
    }
    for (; !sends_.empty(); sends_.pop_front()) {
        complete_send(*lock, sends_.front(), IBV_WC_WR_FLUSH_ERR);
    }
    push_completions(*lock);
    ibv_wc flushed{};
    flushed.status = IBV_WC_WR_FLUSH_ERR;
    flushed.opcode = IBV_WC_RECV;
    for (const ReceiveWork& work : receives_) {
        complete_receive(*lock, work, flushed, false);
    }
    receives_.clear();
    return true;
}

// Wait until there is something to do: a response, a posted request, another state, or a deadline.
void QueuePair::wait_for_work(Lock* lock) {
    RequesterState& requester = requester_state_;
    if (change_pending_) {
        return;
    }
    const auto until = next_deadline();
    const bool for_responses = !requester.in_flight.empty();
    // A connected pair has just worked or was just woken, so the next request or response is probably near: poll before
    // sleeping.
    if (link_ != nullptr) {
        const auto new_responses = [&] { return for_responses ? link_->responded() - requester.responded : 0; };
        const std::uint32_t wanted_responses = for_responses ? wake_threshold() : 1;
        lock->unlock();
        const bool seen = spin_until([&] { return change_pending_ || new_responses() >= wanted_responses; });
        lock->lock();
        if (seen || change_pending_ || new_responses() > 0) {
            return;
        }
    }
    requester_asleep_ = true;
    lock->unlock();
    if (for_responses) {
        sleep_for_responses(until);
    } else {
        sleep(nullptr, until);
    }
    lock->lock();
    requester_asleep_ = false;
}

QueuePair::Clock::time_point QueuePair::next_deadline() const {
    const RequesterState& requester = requester_state_;
    auto until = requester.in_flight.empty() ? Clock::time_point::max() : requester.last_response + peer_timeout;
    if (!delayed_completions_.empty()) {
        until = std::min(until, delayed_completions_.front().when);
    }
    if (requester.retry_at) {
        until = std::min(until, *requester.retry_at);
    }
    return until;
}

// Number of new responses that wakes this thread: half of those in flight, because waking for each of them costs more
// than handling it.
std::uint32_t QueuePair::wake_threshold() const {
    return static_cast<std::uint32_t>((requester_state_.in_flight.size() + 1) / 2);
}

void QueuePair::sleep_for_responses(Clock::time_point until) {
    RequesterState& requester = requester_state_;
    if (!link_->request_wake_at(requester.responded + wake_threshold())) {
        return;
    }
    pollfd peer{peer_.get(), POLLIN, 0};
    sleep(&peer, until);
    if (peer.revents != 0) {
        char wakes[64];
        const ssize_t received = recv(peer_.get(), wakes, sizeof wakes, MSG_DONTWAIT);
        requester.peer_gone |= received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR);
    } else if (link_->responded() == requester.responded && Clock::now() - requester.last_response >= peer_timeout) {
        requester.peer_gone = true;
    }
}

void QueuePair::sleep(pollfd* peer, Clock::time_point until) {
    pollfd waiting[2] = {{wake_eventfd_.get(), POLLIN, 0}, {}};
    if (peer != nullptr) {
        waiting[1] = *peer;
    }
    timespec time{};
    if (until != Clock::time_point::max()) {
        const auto left_ns = std::max<std::int64_t>((until - Clock::now()).count(), 0);
        time = {left_ns / 1'000'000'000, left_ns % 1'000'000'000};
    }
    ppoll(waiting, peer != nullptr ? 2 : 1, until == Clock::time_point::max() ? nullptr : &time, nullptr);
    if ((waiting[0].revents & POLLIN) != 0) {
        eventfd_t count = 0;
        eventfd_read(wake_eventfd_.get(), &count);
    }
    if (peer != nullptr) {
        *peer = waiting[1];
    }
}

void QueuePair::count_sent(const SendWork& work) {
    Traffic::Direction& sent = context_->device->traffic.sent;
    ++sent.requests;
    switch (work.opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
        sent.send_bytes += work.length_bytes;
        break;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        sent.write_bytes += work.length_bytes;
        break;
    case IBV_WR_RDMA_READ:
        sent.read_bytes += work.length_bytes;
        break;
    default:
        // Atomic requests are counted as requests only.
        break;
    }
}

} // namespace gdrkit::twin::verbs
