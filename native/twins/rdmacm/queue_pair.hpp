// The queue pairs of identifiers: creation, and the states that the connection manager moves them through.
#pragma once

#include "rdmacm/identifier.hpp"

namespace gdrkit::twin::rdmacm {

// Return the path from this identifier to its peer.
ibv_ah_attr make_path_to_remote(const Identifier& id);

// Fill the attributes for a transition of the identifier's queue pair to attr->qp_state. Return 0 or an errno.
int fill_attributes(const Identifier& id, ibv_qp_attr* attr, int* mask);

// Move the queue pair through RTR to RTS. An identifier without a queue pair needs nothing. Return 0 or an errno.
int make_queue_pair_ready(Identifier* id, std::uint8_t responder_resources, std::uint8_t initiator_depth);
// Make the queue pair of the active side ready, and tell the peer. Return 0 or an errno.
int establish_active_side(Identifier* id);
// Move the queue pair, if there is one, to the error state, which flushes its work requests.
void fail_queue_pair(Identifier* id);

} // namespace gdrkit::twin::rdmacm
