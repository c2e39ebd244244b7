// Shared receive queues (SRQ): receive requests that several queue pairs consume. A queue pair of any transport takes
// the next request with take(), and the completion of the request frees its slot in the SRQ.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "ibverbs/completion.hpp"
#include "ibverbs/protection_domain.hpp"
#include "ibverbs/work_request.hpp"

namespace gdrkit::twin::verbs {

class SharedReceiveQueue {
public:
    SharedReceiveQueue(ibv_srq* public_srq, ProtectionDomain* domain, const ibv_srq_attr& attr,
                       std::shared_ptr<CompletionQueue> completion_queue);
    SharedReceiveQueue(const SharedReceiveQueue&) = delete;
    SharedReceiveQueue& operator=(const SharedReceiveQueue&) = delete;

    // Post one receive request. Return 0, EINVAL (too many entries) or ENOMEM (queue full).
    int post(const ibv_recv_wr& wr);
    // Remove and return the next request; nullopt if there is none. Raise IBV_EVENT_SRQ_LIMIT_REACHED if fewer requests
    // than the limit are left.
    std::optional<ReceiveWork> take();
    // Put back a request that take() returned, because its message did not arrive. It becomes the next request again.
    void put_back(ReceiveWork work);

    // Carry out ibv_modify_srq. Return 0 or EINVAL.
    int modify(const ibv_srq_attr& attr, int attr_mask);
    [[nodiscard]] ibv_srq_attr query();

    // The domain in which the keys of the receive requests are valid.
    [[nodiscard]] ProtectionDomain* domain() const { return domain_; }
    // Every completion of a request of this queue must free one of these slots.
    [[nodiscard]] const std::shared_ptr<WorkQueueSlots>& slots() const { return slots_; }

    // The completion queue of an XRC queue; nullptr for a basic queue: its requests complete in the completion queues
    // of the queue pairs.
    [[nodiscard]] const std::shared_ptr<CompletionQueue>& completion_queue() const { return completion_queue_; }
    // The number by which send requests of XRC queue pairs name this queue.
    [[nodiscard]] std::uint32_t number() const { return number_; }

    // Number of queue pairs that use this queue.
    std::atomic<int> user_count{0};
    const std::shared_ptr<EventCounter> async_event_counter = std::make_shared<EventCounter>();

private:
    ibv_srq* const public_srq_;
    ProtectionDomain* const domain_;
    const std::shared_ptr<CompletionQueue> completion_queue_;
    const std::uint32_t number_;
    std::mutex mutex_;
    std::uint32_t max_requests_;
    const std::uint32_t max_sges_;
    // take() raises the event when fewer requests than this number are left. 0: no event is requested.
    std::uint32_t limit_ = 0;
    std::deque<ReceiveWork> requests_;
    const std::shared_ptr<WorkQueueSlots> slots_ = std::make_shared<WorkQueueSlots>();
};

struct SharedReceiveQueueHandle {
    ibv_srq public_srq{};
    std::shared_ptr<SharedReceiveQueue> impl;
    // The XRC domain and the completion queue of an XRC queue; nullptr for a basic queue.
    ibv_xrcd* xrcd = nullptr;
    ibv_cq* cq = nullptr;
};

inline SharedReceiveQueueHandle* get_srq_handle(ibv_srq* srq) {
    return reinterpret_cast<SharedReceiveQueueHandle*>(srq);
}

// Acknowledge one asynchronous event of this queue. ibv_ack_async_event calls this function.
void acknowledge_async(ibv_srq* srq);

} // namespace gdrkit::twin::verbs
