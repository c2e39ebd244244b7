// The thread of a datagram queue pair, which works in turns: in each turn it receives, sends and delivers what is
// pending. While it sleeps, a thread of the application that posts a request or polls a completion queue does a turn
// itself, so a small datagram need not wait until the pair's thread wakes.

#include <sys/eventfd.h>

#include <algorithm>

#include "ibverbs/datagram_queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

// In one turn, at most this number of datagrams is sent, and each socket is read at most this number of times. Then the
// turn goes on with its other tasks.
constexpr int max_rounds_per_turn = 16;
// Time between two attempts to send to a receiver whose queue is full.
constexpr std::chrono::microseconds retry_interval{30};
// If a thread of the application has polled within this time, that thread is expected to receive the datagrams, and the
// pair's thread does not wait for them.
constexpr std::chrono::microseconds poll_timeout{1000};
// If a call posts more bytes than this, the pair's thread sends them. Else the call itself sends them.
constexpr std::uint64_t max_caller_send_bytes = 16U << 10;

} // namespace

void DatagramQueuePair::run() {
    Lock lock(mutex_);
    for (;;) {
        state_changed_.wait(lock, [this] { return !is_making_progress_; });
        // Check this after the wait: close() wakes this thread from wait_for_work(), but not from the wait above.
        if (is_closing_) {
            return;
        }
        has_pending_change_ = false;
        if (!make_progress(&lock)) {
            wait_for_work(&lock);
        }
    }
}

// Do one turn: flush, receive, send, deliver completions and raise events. Return whether there was progress. Only one
// thread at a time does a turn.
bool DatagramQueuePair::make_progress(Lock* lock) {
    is_making_progress_ = true;
    bool has_progress = flush(*lock);
    has_progress |= receive_arrived_datagrams(lock);
    has_progress |= send_posted_requests(lock);
    has_progress |= deliver_due_completions(*lock, &delayed_send_completions_, send_cq_.get());
    has_progress |= deliver_due_completions(*lock, &delayed_receive_completions_, receive_cq_.get());
    raise_events(*lock);
    is_making_progress_ = false;
    state_changed_.notify_all();
    return has_progress;
}

// Do a turn in a thread of the application. If a fault rule for sends exists, leave posted requests to the pair's
// thread, because the rule may delay a request, and a call of the application must not be delayed.
void DatagramQueuePair::make_progress_in_caller(Lock* lock) {
    if (!is_asleep_ || is_making_progress_ || is_closing_ || (!posted_sends_.empty() && has_send_fault_rule())) {
        return;
    }
    make_progress(lock);
    // Wake the pair's thread if it would sleep too long: it delivers delayed completions, and retries a datagram that a
    // full queue has refused.
    if (find_next_deadline() < wake_time_) {
        notify_change(*lock);
    }
}

// Send small requests in the thread that posts them, and wake the pair's thread for requests that remain.
void DatagramQueuePair::send_in_caller(Lock* lock, std::uint64_t posted_bytes) {
    if (posted_bytes <= max_caller_send_bytes) {
        make_progress_in_caller(lock);
    }
    if (!posted_sends_.empty()) {
        notify_change(*lock);
    }
}

void DatagramQueuePair::progress_at_poll() {
    Lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
        polled_at_ = Clock::now();
        make_progress_in_caller(&lock);
    }
}

void DatagramQueuePair::request_wake_for_responses() {
    Lock lock(mutex_);
    polled_at_ = {}; // so wait_for_work() waits for datagrams, and does not leave them to a polling thread
    notify_change(lock);
}

// Push the completions whose due time has come to the completion queue. Completions stay in order, so a delayed
// completion also delays the later completions.
bool DatagramQueuePair::deliver_due_completions(const Lock& lock, DelayedCompletions* delayed_completions,
                                                CompletionQueue* queue) {
    const Clock::time_point now = Clock::now();
    std::vector<Completion> due_completions;
    for (; !delayed_completions->empty() && delayed_completions->front().due_time <= now;
         delayed_completions->pop_front()) {
        due_completions.push_back(std::move(delayed_completions->front().completion));
    }
    // push() fails if the completion queue overflows.
    if (!due_completions.empty() && !queue->push(due_completions) && state_ != IBV_QPS_ERR) {
        enter_error(lock, IBV_QPS_ERR);
        context_->raise(public_qp_, IBV_EVENT_QP_FATAL, async_event_counter);
    }
    return !due_completions.empty();
}

// If the queue pair is in ERR or SQE, complete all send requests with a flush error; in ERR, also all receive requests.
bool DatagramQueuePair::flush(const Lock& lock) {
    if (state_ != IBV_QPS_ERR && state_ != IBV_QPS_SQE) {
        return false;
    }
    bool has_progress = !posted_sends_.empty();
    for (; !posted_sends_.empty(); posted_sends_.pop_front()) {
        complete_send(lock, posted_sends_.front().send_work, IBV_WC_WR_FLUSH_ERR);
    }
    if (state_ == IBV_QPS_ERR) {
        has_progress |= !posted_receives_.empty();
        ibv_wc flush_wc{};
        flush_wc.status = IBV_WC_WR_FLUSH_ERR;
        flush_wc.opcode = IBV_WC_RECV;
        for (; !posted_receives_.empty(); posted_receives_.pop_front()) {
            complete_receive(lock, posted_receives_.front(), flush_wc, false);
        }
    }
    return has_progress;
}

// Raise the events that must follow the completions, once these are delivered.
void DatagramQueuePair::raise_events(const Lock&) {
    if (state_ == IBV_QPS_ERR && must_raise_last_wqe_ && delayed_receive_completions_.empty()) {
        must_raise_last_wqe_ = false;
        context_->raise(public_qp_, IBV_EVENT_QP_LAST_WQE_REACHED, async_event_counter);
    }
    if (state_ == IBV_QPS_SQD && must_raise_drained_ && delayed_send_completions_.empty()) {
        must_raise_drained_ = false;
        context_->raise(public_qp_, IBV_EVENT_SQ_DRAINED, async_event_counter);
    }
}

bool DatagramQueuePair::send_posted_requests(Lock* lock) {
    bool has_progress = false;
    for (int round = 0; round < max_rounds_per_turn && state_ == IBV_QPS_RTS && !posted_sends_.empty() && !is_closing_;
         ++round) {
        if (retry_at_ && *retry_at_ > Clock::now()) {
            break;
        }
        // The reference stays valid: other threads only append requests, and reset() waits for this thread.
        DatagramWork& work = posted_sends_.front();
        const std::uint32_t own_qkey = attr_.qkey;
        is_busy_ = true;
        lock->unlock();
        const std::optional<ibv_wc_status> status = transmit(&work, own_qkey);
        lock->lock();
        has_progress = true;
        if (state_ == IBV_QPS_RESET) {
            // reset() discards the request.
        } else if (!status) {
            retry_at_ = Clock::now() + retry_interval;
        } else {
            retry_at_.reset();
            complete_send(*lock, work.send_work, *status);
            posted_sends_.pop_front();
            if (*status != IBV_WC_SUCCESS) {
                enter_error(*lock, IBV_QPS_SQE);
            }
        }
        mark_idle(lock);
    }
    return has_progress;
}

bool DatagramQueuePair::receive_arrived_datagrams(Lock* lock) {
    bool has_progress = false;
    for (int round = 0; round < max_rounds_per_turn && !is_closing_; ++round) {
        const std::shared_ptr<const Receivers> receivers = receivers_;
        bool has_received = false;
        for (const auto& receiver : *receivers) {
            is_busy_ = true;
            lock->unlock();
            DatagramHeader header{};
            const bool has_frame = receive_frame(*receiver, &header);
            lock->lock();
            if (has_frame && header.magic != 0) {
                deliver_frame(lock, header);
            }
            has_received |= has_frame;
            mark_idle(lock);
            // attach() or detach() has replaced the list. A socket that detach() removed must not be read again.
            if (receivers != receivers_) {
                break;
            }
        }
        has_progress |= has_received;
        if (!has_received) {
            break;
        }
    }
    return has_progress;
}

DatagramQueuePair::Clock::time_point DatagramQueuePair::find_next_deadline() const {
    auto deadline = Clock::time_point::max();
    for (const DelayedCompletions* delayed : {&delayed_send_completions_, &delayed_receive_completions_}) {
        if (!delayed->empty()) {
            deadline = std::min(deadline, delayed->front().due_time);
        }
    }
    if (retry_at_ && state_ == IBV_QPS_RTS && !posted_sends_.empty()) {
        deadline = std::min(deadline, *retry_at_);
    }
    return deadline;
}

// Wait until there is something to do: a datagram, a posted request, another state, or a deadline.
void DatagramQueuePair::wait_for_work(Lock* lock) {
    if (has_pending_change_) {
        return;
    }
    auto deadline = find_next_deadline();
    const bool is_polled = Clock::now() - polled_at_ < poll_timeout;
    const std::shared_ptr<const Receivers> receivers = receivers_;
    std::vector<pollfd> poll_fds{{wake_eventfd_.get(), POLLIN, 0}};
    if (is_polled) {
        deadline = std::min(deadline, Clock::now() + poll_timeout);
    } else {
        for (const auto& receiver : *receivers) {
            poll_fds.push_back({receiver->socket.get(), POLLIN, 0});
        }
    }
    is_asleep_ = true;
    wake_time_ = deadline;
    lock->unlock();
    timespec timeout{};
    if (deadline != Clock::time_point::max()) {
        const auto remaining_ns = std::max<std::int64_t>((deadline - Clock::now()).count(), 0);
        timeout = {remaining_ns / 1'000'000'000, remaining_ns % 1'000'000'000};
    }
    ppoll(poll_fds.data(), poll_fds.size(), deadline == Clock::time_point::max() ? nullptr : &timeout, nullptr);
    eventfd_t wake_count = 0;
    eventfd_read(wake_eventfd_.get(), &wake_count);
    lock->lock();
    is_asleep_ = false;
}

} // namespace gdrkit::twin::verbs
