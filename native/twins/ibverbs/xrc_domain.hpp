// XRC domains. The receive queue pairs of a domain deliver each message to the shared receive queue of the domain that
// the message names. All opened domains of one file are one domain.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "ibverbs/shared_receive_queue.hpp"

namespace gdrkit::twin::verbs {

class XrcDomain {
public:
    void add(const std::shared_ptr<SharedReceiveQueue>& srq);
    void remove(const SharedReceiveQueue& srq);
    // Return the queue with this number; nullptr if the domain has none.
    std::shared_ptr<SharedReceiveQueue> find(std::uint32_t number);
    // Remove the completions of a queue pair that is reset or destroyed from the completion queues of all its queues.
    void drop_completions(std::uint32_t qp_num);

private:
    std::mutex mutex_;
    std::map<std::uint32_t, std::shared_ptr<SharedReceiveQueue>> queues_;
};

struct XrcDomainHandle {
    ibv_xrcd abi{};
    std::shared_ptr<XrcDomain> model;
    // Number of queue pairs and shared receive queues that were created with this structure.
    std::atomic<int> user_count{0};
};

inline XrcDomainHandle* xrcd_handle_of(ibv_xrcd* xrcd) {
    return reinterpret_cast<XrcDomainHandle*>(xrcd);
}

// Operations of the table of a context.
ibv_xrcd* open_xrc_domain(ibv_context* context, ibv_xrcd_init_attr* init_attr);
int close_xrc_domain(ibv_xrcd* xrcd);

} // namespace gdrkit::twin::verbs
