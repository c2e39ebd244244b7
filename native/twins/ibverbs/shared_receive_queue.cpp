// Implements shared receive queues: posts, takes and returns receive requests, and changes the size and the limit.

#include "ibverbs/shared_receive_queue.hpp"

#include <cerrno>

#include "model/config.hpp"

namespace gdrkit::twin::verbs {

namespace {

// Return the number of a new queue. A number has 24 bits, so the numbers repeat after 16 million queues. The number 0
// is not used, because 0 in a request means that the request goes to no shared receive queue.
std::uint32_t make_queue_number() {
    static std::atomic<std::uint32_t> last_number{static_cast<std::uint32_t>(random_u64())};
    const std::uint32_t number = ++last_number & 0xffffff;
    return number != 0 ? number : make_queue_number();
}

} // namespace

SharedReceiveQueue::SharedReceiveQueue(ibv_srq* public_srq, ProtectionDomain* domain, const ibv_srq_attr& attr,
                                       std::shared_ptr<CompletionQueue> completion_queue)
    : public_srq_(public_srq), domain_(domain), completion_queue_(std::move(completion_queue)),
      number_(make_queue_number()), max_requests_(attr.max_wr), max_sges_(attr.max_sge) {}

int SharedReceiveQueue::post(const ibv_recv_wr& wr) {
    if (!is_valid_sge_list(wr.sg_list, wr.num_sge, max_sges_)) {
        return EINVAL;
    }
    std::lock_guard lock(mutex_);
    if (slots_->used_count >= max_requests_) {
        return ENOMEM;
    }
    ++slots_->used_count;
    requests_.push_back(to_receive_work(wr));
    return 0;
}

std::optional<ReceiveWork> SharedReceiveQueue::take() {
    std::lock_guard lock(mutex_);
    if (requests_.empty()) {
        return std::nullopt;
    }
    ReceiveWork work = std::move(requests_.front());
    requests_.pop_front();
    // As in Soft-RoCE, only taking a request raises the event. If a limit is set while fewer requests are left, the
    // next message raises it.
    if (requests_.size() < limit_) {
        limit_ = 0;
        domain_->context->raise(public_srq_, IBV_EVENT_SRQ_LIMIT_REACHED, async_event_counter);
    }
    return work;
}

void SharedReceiveQueue::put_back(ReceiveWork work) {
    std::lock_guard lock(mutex_);
    requests_.push_front(std::move(work));
}

int SharedReceiveQueue::modify(const ibv_srq_attr& attr, int attr_mask) {
    const auto max_wr = static_cast<std::uint32_t>(make_device_attributes(*domain_->context->device).max_srq_wr);
    std::lock_guard lock(mutex_);
    const bool changes_size = (attr_mask & IBV_SRQ_MAX_WR) != 0;
    const std::uint32_t new_size = changes_size ? attr.max_wr : max_requests_;
    const std::uint32_t new_limit = (attr_mask & IBV_SRQ_LIMIT) != 0 ? attr.srq_limit : limit_;
    // The kernel's rxe_srq_chk_attr and rxe_queue_resize refuse the same values.
    if ((attr_mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT)) != 0 || new_size == 0 || new_size > max_wr ||
        new_size < slots_->used_count || new_limit > new_size) {
        return EINVAL;
    }
    max_requests_ = new_size;
    limit_ = new_limit;
    return 0;
}

ibv_srq_attr SharedReceiveQueue::query() {
    std::lock_guard lock(mutex_);
    return {max_requests_, max_sges_, limit_};
}

} // namespace gdrkit::twin::verbs
