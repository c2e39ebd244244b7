// The ports of the port spaces, and the names of the sockets of listeners. The processes of one domain, whose twins
// reach each other (see model/config.hpp), share the ports.
#pragma once

#include "rdmacm/identifier.hpp"

namespace gdrkit::twin::rdmacm {

// Claim a port for the identifier at this address; 0 means any free port. Return 0, EADDRINUSE, EACCES for a port below
// 1024 that the user may not bind, or EADDRNOTAVAIL if no free port was found. The caller holds the lock of the
// manager.
int claim_port(Identifier* id, const IpAddress& address, std::uint16_t port);
// Claim the port of an identifier that begins to listen, if claim_port() has left it shared (RDMA_OPTION_ID_REUSEADDR).
// Return 0 or EADDRINUSE.
int claim_exclusively(Identifier* id);

// Return the socket names at which an identifier listens: one name for each GID that peers can use to reach it.
std::vector<std::string> list_listener_names(const Identifier& id);
// Return the socket names at which a listener for this destination can be, the most specific name first.
std::vector<std::string> list_names_to_try(rdma_port_space port_space, const ibv_gid& gid, const IpAddress& address,
                                           std::uint16_t port);

// The following functions are implemented in bind.cpp. The caller holds the lock of the manager.

// Bind the identifier to the wildcard address of the family and a free port. Return 0 or an errno.
int bind_to_any(Identifier* identifier, int family);
// Store the path between the identifier's two addresses as its route. Return 0 or ENOMEM.
int resolve_route_now(Identifier* identifier);

} // namespace gdrkit::twin::rdmacm
