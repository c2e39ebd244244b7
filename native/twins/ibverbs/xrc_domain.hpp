// XRC domains. Each message names a shared receive queue of the domain, and the receive queue pairs of the domain
// deliver the message to that queue. Clients that open the same file get the same domain. The domain owns its receive
// queue pairs. ibv_create_qp_ex creates a receive queue pair with its first ibv_qp, and ibv_open_qp adds a further
// ibv_qp. The queue pair is destroyed with its last ibv_qp.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ibverbs/shared_receive_queue.hpp"

namespace gdrkit::twin::verbs {

class QueuePair;

class XrcDomain {
public:
    void add_queue(const std::shared_ptr<SharedReceiveQueue>& srq);
    void remove_queue(const SharedReceiveQueue& srq);
    // Return the queue with this number; nullptr if the domain has none.
    std::shared_ptr<SharedReceiveQueue> find_queue(std::uint32_t number);
    // Remove the completions of this queue pair, which is reset or destroyed, from the completion queues of all shared
    // receive queues of the domain.
    void drop_completions(std::uint32_t qp_num);

    // Add a receive queue pair with its first ibv_qp.
    void add_receive_qp(const std::shared_ptr<QueuePair>& queue_pair, ibv_qp* public_qp);
    // Add an ibv_qp to the receive queue pair with this number, and return the queue pair; nullptr if there is none.
    std::shared_ptr<QueuePair> open_receive_qp(std::uint32_t qp_num, ibv_qp* public_qp);
    // Remove an ibv_qp. Return true if its queue pair has no ibv_qp left, or if the domain does not have the queue
    // pair.
    bool remove_public_qp(const ibv_qp* public_qp);
    // Raise an asynchronous event for every ibv_qp of a receive queue pair.
    void raise(std::uint32_t qp_num, ibv_event_type type);

private:
    struct ReceiveQp {
        std::shared_ptr<QueuePair> impl;
        std::vector<ibv_qp*> public_qps;
    };

    std::mutex mutex_;
    std::map<std::uint32_t, std::shared_ptr<SharedReceiveQueue>> queues_; // by queue number
    std::map<std::uint32_t, ReceiveQp> receive_qps_;                      // by queue pair number
};

struct XrcDomainHandle {
    ibv_xrcd public_xrcd{};
    std::shared_ptr<XrcDomain> impl;
    // Number of queue pairs and shared receive queues that were created with this ibv_xrcd and still exist.
    std::atomic<int> user_count{0};
};

inline XrcDomainHandle* get_xrcd_handle(ibv_xrcd* xrcd) {
    return reinterpret_cast<XrcDomainHandle*>(xrcd);
}

// Functions for the table of operations in a context.
ibv_xrcd* open_xrc_domain(ibv_context* context, ibv_xrcd_init_attr* init_attr);
int close_xrc_domain(ibv_xrcd* xrcd);

} // namespace gdrkit::twin::verbs
