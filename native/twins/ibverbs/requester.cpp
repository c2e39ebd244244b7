// The thread of a queue pair that has its send requests carried out in order (requester_work.cpp), completes them, late
// by seed, and flushes both queues when the pair is in error.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>

#include "ibverbs/queue_pair.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A peer that is stopped, not dead, is given up after this time; one that is dead is seen at once.
constexpr std::chrono::seconds longest_silence{30};
// So many requests are taken over at a time.
constexpr std::size_t taken_most = 64;

} // namespace

void QueuePair::run_requester() {
    Lock lock(mutex_);
    while (!closing_) {
        news_ = false;
        bool moved = deliver_due(lock);
        if (state_ == IBV_QPS_RTS || state_ == IBV_QPS_SQD) {
            moved |= take_turn(&lock);
        } else {
            abandon(lock);
            moved |= flush(&lock);
        }
        if (!moved) {
            rest(&lock);
        }
    }
    abandon(lock);
}

// Whether anything moved.
bool QueuePair::take_turn(Lock* lock) {
    Sending& own = sending_work_;
    if (state_ == IBV_QPS_SQD) {
        // What was not begun does not begin now.
        give_back_work(*lock, &own.taken);
    } else {
        take_work(*lock);
    }
    if (own.taken.empty() && own.begun.empty()) {
        stop_sending(*lock);
        if (state_ == IBV_QPS_SQD && drain_event_wanted_ && due_.empty()) {
            drain_event_wanted_ = false;
            context_->raise(abi_, IBV_EVENT_SQ_DRAINED, async_events);
        }
        return false;
    }
    sending_ = true;
    const ibv_qp_attr attr = attr_;
    lock->unlock();
    const bool moved = advance(attr);
    lock->lock();
    settle(*lock);
    return moved;
}

void QueuePair::take_work(const Lock&) {
    Fifo<SendWork>& taken = sending_work_.taken;
    while (taken.size() < taken_most && !sends_.empty()) {
        taken.push_back(std::move(sends_.front()));
        sends_.pop_front();
    }
}

void QueuePair::give_back_work(const Lock&, Fifo<SendWork>* works) {
    for (; !works->empty(); works->pop_back()) {
        sends_.push_front(std::move(works->back()));
    }
}

// Completes what was answered and what failed, after a turn.
void QueuePair::settle(const Lock& lock) {
    Sending& own = sending_work_;
    if (state_ != IBV_QPS_RESET) {
        for (; !own.finished.empty(); own.finished.pop_front()) {
            count_sent(own.finished.front());
            complete_late(lock, std::move(own.finished.front()), IBV_WC_SUCCESS);
        }
        // A request that the pair itself interrupted is flushed.
        if (own.failed && *own.failed != IBV_WC_WR_FLUSH_ERR) {
            complete_late(lock, std::move(own.begun.front()), *own.failed);
            own.begun.pop_front();
            push_completed(lock);
            enter_error(lock, nullptr);
        }
        push_completed(lock);
    } else {
        own.finished.clear();
    }
    if (own.taken.empty() && own.begun.empty()) {
        stop_sending(lock);
    }
}

void QueuePair::stop_sending(const Lock&) {
    if (sending_) {
        sending_ = false;
        changed_.notify_all();
    }
}

void QueuePair::hang_up(const Lock&) {
    if (link_ != nullptr) {
        link_->end();
    }
    peer_.reset();
    link_.reset();
}

// The pair stopped sending: what was not answered will be flushed, or was reset.
void QueuePair::abandon(const Lock& lock) {
    Sending& own = sending_work_;
    hang_up(lock);
    if (state_ == IBV_QPS_ERR) {
        give_back_work(lock, &own.taken);
        give_back_work(lock, &own.begun);
    }
    own = Sending{};
    stop_sending(lock);
}

void QueuePair::complete_late(const Lock& lock, SendWork work, ibv_wc_status status) {
    const std::uint64_t late_us = lateness_us();
    if (late_us == 0 && due_.empty()) {
        complete_send(lock, work, status);
    } else {
        due_.push_back({std::move(work), status, Clock::now() + std::chrono::microseconds(late_us)});
    }
}

// In order: who is late holds up those behind it.
bool QueuePair::deliver_due(const Lock& lock) {
    bool any = false;
    while (!due_.empty() && due_.front().when <= Clock::now()) {
        complete_send(lock, due_.front().work, due_.front().status);
        due_.pop_front();
        any = true;
    }
    push_completed(lock);
    return any;
}

// False when there is nothing to flush, or something else comes first.
bool QueuePair::flush(Lock* lock) {
    const auto to_flush = [this] {
        return state_ == IBV_QPS_ERR && due_.empty() && arriving_count_ == 0 && !(sends_.empty() && receives_.empty());
    };
    if (!to_flush()) {
        return false;
    }
    const std::uint64_t generation = generation_;
    flushing_ = true;
    lock->unlock();
    be_late();
    lock->lock();
    flushing_ = false;
    changed_.notify_all();
    if (generation != generation_ || !to_flush()) {
        return true;
    }
    for (; !sends_.empty(); sends_.pop_front()) {
        complete_send(*lock, sends_.front(), IBV_WC_WR_FLUSH_ERR);
    }
    push_completed(*lock);
    ibv_wc flushed{};
    flushed.status = IBV_WC_WR_FLUSH_ERR;
    flushed.opcode = IBV_WC_RECV;
    for (const ReceiveWork& work : receives_) {
        complete_receive(*lock, work, flushed, false);
    }
    receives_.clear();
    return true;
}

// Until there is something to do: an answer, work, another state, or a time that has come.
void QueuePair::rest(Lock* lock) {
    Sending& own = sending_work_;
    if (news_) {
        return;
    }
    const auto until = time_to_look();
    const bool for_answers = !own.chunks.empty();
    // A pair with a peer that comes here has worked or was woken, and the next request is as near as an answer.
    if (link_ != nullptr) {
        const auto answers = [&] { return for_answers ? link_->answered() - own.answered : 0; };
        const std::uint32_t enough = for_answers ? worth_waking() : 1;
        lock->unlock();
        const bool seen = spin_until([&] { return news_ || answers() >= enough; });
        lock->lock();
        if (seen || news_ || answers() > 0) {
            return;
        }
    }
    asleep_ = true;
    lock->unlock();
    if (for_answers) {
        sleep_for_answers(until);
    } else {
        sleep(nullptr, until);
    }
    lock->lock();
    asleep_ = false;
}

QueuePair::Clock::time_point QueuePair::time_to_look() const {
    const Sending& own = sending_work_;
    auto until = own.chunks.empty() ? Clock::time_point::max() : own.heard + longest_silence;
    if (!due_.empty()) {
        until = std::min(until, due_.front().when);
    }
    if (own.try_again) {
        until = std::min(until, *own.try_again);
    }
    return until;
}

// Half of the answers at once: to go to work for each costs more than the work.
std::uint32_t QueuePair::worth_waking() const {
    return static_cast<std::uint32_t>((sending_work_.chunks.size() + 1) / 2);
}

void QueuePair::sleep_for_answers(Clock::time_point until) {
    Sending& own = sending_work_;
    if (!link_->ask_wake_at(own.answered + worth_waking())) {
        return;
    }
    pollfd peer{peer_.get(), POLLIN, 0};
    sleep(&peer, until);
    if (peer.revents != 0) {
        char wakes[64];
        const ssize_t got = recv(peer_.get(), wakes, sizeof wakes, MSG_DONTWAIT);
        own.hung_up |= got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    } else if (link_->answered() == own.answered && Clock::now() - own.heard >= longest_silence) {
        own.hung_up = true;
    }
}

void QueuePair::sleep(pollfd* peer, Clock::time_point until) {
    pollfd waiting[2] = {{doorbell_.get(), POLLIN, 0}, {}};
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
        eventfd_read(doorbell_.get(), &count);
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
        // An atomic request counts as a request only.
        break;
    }
}

} // namespace gdrkit::twin::verbs
