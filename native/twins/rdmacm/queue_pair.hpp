// Functions of the connection manager for the queue pair of an rdma_cm_id: its path, its attributes, and the moves
// through its states. queue_pair.cpp also implements the functions of librdmacm that create queue pairs, such as
// rdma_create_qp.
#pragma once

#include "rdmacm/identifier.hpp"

namespace gdrkit::twin::rdmacm {

// Return the path from this identifier to its peer, for an address handle or a queue pair.
ibv_ah_attr make_path_to_remote(const Identifier& id);

// Fill in the attributes for a transition of the identifier's queue pair to the state attr->qp_state, and store in
// *attr_mask which attributes the transition sets (IBV_QP_*). Return 0 or an errno. The caller holds the lock of the
// manager.
int fill_attributes(const Identifier& id, ibv_qp_attr* attr, int* attr_mask);

// The caller must not hold the lock of the manager when it calls the functions below.

// Move the queue pair through INIT and RTR to RTS, with these limits of RDMA reads and atomics. The value
// RDMA_MAX_RESP_RES or RDMA_MAX_INIT_DEPTH of rdma_cma.h (here rdma_max_resp_res, rdma_max_init_depth) means the limit
// that is stored in the identifier. Return 0 or an errno. If the identifier has no queue pair, return 0 and do nothing.
int make_queue_pair_ready(Identifier* id, std::uint8_t responder_resources, std::uint8_t initiator_depth);
// Make the queue pair of the active side ready, and send the ready-to-use message. If this fails, reject the
// connection. Return 0 or an errno.
int establish_active_side(Identifier* id);
// Move the queue pair, if there is one, to the error state, which flushes its work requests.
void fail_queue_pair(Identifier* id);

} // namespace gdrkit::twin::rdmacm
