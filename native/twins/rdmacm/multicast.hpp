// The multicast groups of datagram identifiers.
#pragma once

#include "rdmacm/identifier.hpp"

namespace gdrkit::twin::rdmacm {

// Attach the identifier's queue pair to a group that it has joined, and store the context of the join. Return 0 or an
// errno. The caller does not hold the lock of the manager.
int attach_to_group(Identifier* id, const IpAddress& address, void** context);

} // namespace gdrkit::twin::rdmacm
