// XRC domains. Each message names a shared receive queue of the domain, and the receive queue pairs of the domain
// deliver the message to that queue. Clients that open the same file get the same domain. A receive queue pair belongs
// to its domain. Clients can have several ibv_qp structures for the pair (ibv_open_qp), and the pair is closed when the
// last structure is destroyed.
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
    // Remove the completions of a queue pair that is reset or destroyed from the completion queues of all shared
    // receive queues of the domain.
    void drop_completions(std::uint32_t qp_num);

    // Add a receive queue pair with its first structure.
    void add_pair(const std::shared_ptr<QueuePair>& pair, ibv_qp* structure);
    // Add a structure to the receive queue pair with this number, and return the pair; nullptr if there is none.
    std::shared_ptr<QueuePair> open_pair(std::uint32_t qp_num, ibv_qp* structure);
    // Remove a structure. Return whether its pair has no structure left, also if the domain does not have the pair.
    bool remove_structure(const ibv_qp* structure);
    // Raise an asynchronous event for every structure of a pair.
    void raise(std::uint32_t qp_num, ibv_event_type type);

private:
    struct ReceivePair {
        std::shared_ptr<QueuePair> impl;
        std::vector<ibv_qp*> structures;
    };

    std::mutex mutex_;
    std::map<std::uint32_t, std::shared_ptr<SharedReceiveQueue>> queues_; // by their numbers
    std::map<std::uint32_t, ReceivePair> pairs_;                          // by their queue pair numbers
};

struct XrcDomainHandle {
    ibv_xrcd public_xrcd{};
    std::shared_ptr<XrcDomain> impl;
    // Number of queue pairs and shared receive queues that were created with this structure.
    std::atomic<int> user_count{0};
};

inline XrcDomainHandle* get_xrcd_handle(ibv_xrcd* xrcd) {
    return reinterpret_cast<XrcDomainHandle*>(xrcd);
}

// Functions for the table of operations in a context.
ibv_xrcd* open_xrc_domain(ibv_context* context, ibv_xrcd_init_attr* init_attr);
int close_xrc_domain(ibv_xrcd* xrcd);

} // namespace gdrkit::twin::verbs
