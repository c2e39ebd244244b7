// The queue pairs of identifiers: creation, and the states that the connection manager moves them through.
#pragma once

#include "rdmacm/identifier.hpp"

namespace gdrkit::twin::rdmacm {

// Return the path from this identifier to its peer, for an address handle or a queue pair.
ibv_ah_attr make_path_to_remote(const Identifier& id);

// Fill in the attributes for a transition of the identifier's queue pair to the state attr->qp_state, and store in
// *mask which attributes the transition sets (IBV_QP_*). Return 0 or an errno. The caller holds the lock of the
// manager.
int fill_attributes(const Identifier& id, ibv_qp_attr* attr, int* mask);

// The caller must not hold the lock of the manager when it calls the functions below.

// Move the queue pair through INIT and RTR to RTS, with these limits of RDMA reads and atomics. rdma_max_resp_res and
// rdma_max_init_depth mean the limits of the identifier. Do nothing without a queue pair. Return 0 or an errno.
int make_queue_pair_ready(Identifier* id, std::uint8_t responder_resources, std::uint8_t initiator_depth);
// Make the queue pair of the active side ready, and send the ready-to-use message. If this fails, reject the
// connection. Return 0 or an errno.
int establish_active_side(Identifier* id);
// Move the queue pair, if there is one, to the error state, which flushes its work requests.
void fail_queue_pair(Identifier* id);

} // namespace gdrkit::twin::rdmacm
