// The interface through which the exported verbs functions use a queue pair. Connected and datagram queue pairs derive
// from it.
#pragma once

#include <cstdint>
#include <memory>

#include "ibverbs/completion.hpp"
#include "ibverbs/extended_post.hpp"
#include "ibverbs/protection_domain.hpp"
#include "ibverbs/shared_receive_queue.hpp"
#include "ibverbs/work_request.hpp"

namespace gdrkit::twin::verbs {

class QueuePair {
public:
    QueuePair(ibv_qp* public_qp, ProtectionDomain* domain, std::shared_ptr<CompletionQueue> send_cq,
              std::shared_ptr<CompletionQueue> receive_cq, const ibv_qp_init_attr& init_attr)
        : public_qp_(public_qp), domain_(domain), context_(get_context(public_qp->context)),
          send_cq_(std::move(send_cq)), receive_cq_(std::move(receive_cq)), init_attr_(init_attr),
          shared_receive_queue_(init_attr.srq != nullptr ? get_srq_handle(init_attr.srq)->impl : nullptr) {}
    virtual ~QueuePair() = default;
    QueuePair(const QueuePair&) = delete;
    QueuePair& operator=(const QueuePair&) = delete;

    // Choose a queue pair number and start the pair. Return 0 or an errno.
    virtual int open() = 0;
    // Stop the pair and remove its completions. The pair accesses no memory after this call.
    virtual void close() = 0;
    // Carry out ibv_modify_qp. Return 0 or an errno.
    virtual int modify(const ibv_qp_attr& attr, int attr_mask) = 0;
    virtual void query(ibv_qp_attr* attr, ibv_qp_init_attr* init_attr) = 0;
    // Post a list of send requests. Return 0, EINVAL, EOPNOTSUPP or ENOMEM (queue full). On an error, *bad_wr is the
    // request that failed; the requests before it are posted.
    virtual int post_send(ibv_send_wr* list, ibv_send_wr** bad_wr) = 0;
    // Post one receive request. Return 0, EINVAL or ENOMEM (queue full).
    virtual int post_receive(const ibv_recv_wr& wr) = 0;
    // A pair that is in a multicast group cannot be destroyed.
    [[nodiscard]] virtual bool is_in_multicast_group() { return false; }

    // Return the number of send requests that can be posted now.
    virtual std::uint32_t count_free_send_slots() = 0;

    [[nodiscard]] const ibv_qp_cap& capacity() const { return init_attr_.cap; }
    [[nodiscard]] std::uint32_t qp_num() const { return qp_num_; }
    [[nodiscard]] ibv_qp_type type() const { return init_attr_.qp_type; }

    const std::shared_ptr<EventCounter> async_event_counter = std::make_shared<EventCounter>();

protected:
    // Return the attributes of a pair in the state RESET.
    [[nodiscard]] ibv_qp_attr make_initial_attributes() const {
        ibv_qp_attr attr{};
        attr.path_mig_state = IBV_MIG_MIGRATED;
        attr.cap = init_attr_.cap;
        return attr;
    }

    ibv_qp* const public_qp_;
    ProtectionDomain* const domain_; // nullptr for an XRC receive queue pair
    Context* const context_;
    const std::shared_ptr<CompletionQueue> send_cq_;
    const std::shared_ptr<CompletionQueue> receive_cq_;
    const ibv_qp_init_attr init_attr_;
    // Source of the receive requests; nullptr if the pair has a receive queue of its own.
    const std::shared_ptr<SharedReceiveQueue> shared_receive_queue_;
    std::uint32_t qp_num_ = 0;
};

struct QueuePairHandle {
    // The extended structure begins with an ibv_qp.
    ibv_qp_ex public_qp_ex{};
    std::shared_ptr<QueuePair> impl;
    // Counts the asynchronous events that name this ibv_qp. An ibv_qp that ibv_open_qp made has its own counter; all
    // others have the counter of `impl`.
    std::shared_ptr<EventCounter> async_event_counter;
    ibv_xrcd* xrcd = nullptr;                // set for an XRC receive queue pair
    std::unique_ptr<RequestBuilder> builder; // set for an extended queue pair
    bool has_reached_rtr = false;            // whether ibv_modify_qp has moved the pair to the state RTR
};

inline QueuePairHandle* get_qp_handle(ibv_qp* qp) {
    return reinterpret_cast<QueuePairHandle*>(qp);
}

// Post a list of send requests. If another thread builds a list of requests of the queue pair (ibv_wr_start), wait
// until that thread calls ibv_wr_complete or ibv_wr_abort.
int post_list(QueuePairHandle* handle, ibv_send_wr* list, ibv_send_wr** bad_wr);

// Acknowledge one asynchronous event of this queue pair. ibv_ack_async_event calls this function.
void acknowledge_async(ibv_qp* qp);

} // namespace gdrkit::twin::verbs
