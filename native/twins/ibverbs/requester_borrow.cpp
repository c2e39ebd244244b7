// While the requester thread of a queue pair sleeps, threads of the application borrow its state and do its work: they
// send small requests when they post them, and handle the responses when they poll. So a small request need not wait
// until the requester thread wakes. The requester thread does the rest: large requests, errors, delayed completions,
// and requests whose completion queue is not polled.
#include <sys/timerfd.h>

#include "ibverbs/connected_queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Largest number of bytes that the application's thread sends in a post call. The requester thread sends larger lists,
// so that the call returns soon.
constexpr std::uint64_t max_caller_send_bytes = 16U << 10;
// After this time, the requester thread handles the responses that no poll has handled.
constexpr long poll_timeout_ns = 500'000;

} // namespace

// Send the posted requests in this thread, if the requester thread sleeps and has nothing else to do. Return false if
// the requester thread must be woken to send them.
bool ConnectedQueuePair::try_send_in_caller(Lock* lock, std::uint64_t posted_bytes) {
    if (!is_requester_asleep_ || is_requester_borrowed_ || state_ != IBV_QPS_RTS || link_ == nullptr ||
        posted_bytes > max_caller_send_bytes || link_->may_wait_for_peer() || requester_state_.is_peer_gone ||
        !delayed_completions_.empty()) {
        return false;
    }
    for (std::size_t index = 0; index < posted_sends_.size(); ++index) {
        if (has_fault_rule(posted_sends_[index].opcode)) {
            return false;
        }
    }
    run_borrowed_turn(lock);
    return true;
}

// Take part in a large copy of the requester thread, or handle the responses to requests that a thread of the
// application has sent.
void ConnectedQueuePair::progress_at_poll() {
    parallel_copy_.help();
    if (!awaits_poll_) {
        return;
    }
    Lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && is_requester_asleep_ && !is_requester_borrowed_ && state_ == IBV_QPS_RTS &&
        link_ != nullptr && !requester_state_.chunks_in_flight.empty() &&
        link_->response_count() != requester_state_.handled_count) {
        run_borrowed_turn(&lock);
    }
}

// Let the next response wake the requester thread, because the application will not poll before it gets an event. If
// the requester thread is awake, it handles the responses anyway. An awake requester thread uses requester_state_
// without mutex_, so this function must not read requester_state_ then.
void ConnectedQueuePair::request_wake_for_responses() {
    if (awaits_poll_) {
        Lock lock(mutex_);
        if (is_requester_asleep_ && !is_requester_borrowed_ && link_ != nullptr &&
            !requester_state_.chunks_in_flight.empty() && !link_->request_wake_at(requester_state_.handled_count + 1)) {
            notify_change(lock);
        }
    }
}

// Run a send turn in this thread. Then wake the requester thread if it must continue, or let the poll timeout wake it
// if no thread polls for the responses.
void ConnectedQueuePair::run_borrowed_turn(Lock* lock) {
    RequesterState& requester = requester_state_;
    is_requester_borrowed_ = true;
    run_send_turn(lock);
    is_requester_borrowed_ = false;
    state_changed_.notify_all();
    awaits_poll_ = !requester.chunks_in_flight.empty();
    const bool must_requester_continue = !requester.queued_sends.empty() || !posted_sends_.empty() ||
                                         requester.has_pending_chunk || requester.local_error ||
                                         requester.first_send_error || requester.is_peer_gone ||
                                         !delayed_completions_.empty() || state_ != IBV_QPS_RTS;
    if (must_requester_continue ||
        // The application waits for an event, and will not poll before it.
        (awaits_poll_ && send_cq_->is_armed() && !link_->request_wake_at(requester.handled_count + 1))) {
        notify_change(*lock);
    } else if (awaits_poll_ && !is_poll_timeout_armed_) {
        arm_poll_timeout(*lock);
    }
}

void ConnectedQueuePair::arm_poll_timeout(const Lock&) {
    const itimerspec once{{0, 0}, {0, poll_timeout_ns}};
    is_poll_timeout_armed_ = timerfd_settime(poll_timeout_timer_.get(), 0, &once, nullptr) == 0;
}

} // namespace gdrkit::twin::verbs
