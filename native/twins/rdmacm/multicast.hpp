// The multicast groups of datagram identifiers.
#pragma once

#include "rdmacm/identifier.hpp"

namespace gdrkit::twin::rdmacm {

// Attach the identifier's queue pair to a group that the identifier has joined, and store in *context the pointer that
// the program gave to rdma_join_multicast. If the identifier has left the group meanwhile, do nothing. Return 0 or an
// errno. The caller must not hold the lock of the manager.
int attach_to_group(Identifier* id, const IpAddress& group_address, void** context);

} // namespace gdrkit::twin::rdmacm
