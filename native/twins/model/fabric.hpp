// TCP connections between the machines of a fabric: a set of hosts whose verbs twins act as one RDMA network
// (GDRKIT_TWINS_FABRIC). Both ends of a connection prove that they have the same secret before any other message. The
// connection is neither encrypted nor protected against changes on its way.
//
// No name service is needed: the GID of a NIC is its IP address, and the low 16 bits of a queue pair number are the
// port on which the queue pair listens. RDMA programs exchange both anyway.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>

#include "model/config.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin {

// Return whether the address belongs to another machine of the fabric, so that it is reached by TCP.
bool is_on_other_machine(const FabricAddress& address);

// Listen on a free port of the address. Return the socket or -errno, and store the port.
int listen_on_fabric(const FabricAddress& address, std::uint16_t* port);

// Connect to a port of another machine and exchange the proofs. A peer whose machine does not acknowledge data for
// `timeout` is considered gone (0: never). Return the socket or -errno: -EACCES if the peer has another secret.
int connect_to_fabric(const FabricAddress& address, std::uint16_t port, std::chrono::milliseconds timeout);

// Open a socket for datagrams of other machines at a free port of the address. Return the socket or -errno, and store
// the port.
int open_fabric_receiver(const FabricAddress& address, std::uint16_t* port);

// Send a datagram without waiting. It consists of a proof that the sender has the secret, the header and the payload.
// Return 0 or an errno; the network may lose the datagram.
int send_fabric_datagram(int socket, const FabricAddress& address, std::uint16_t port, const iovec& header,
                         const iovec& payload);

// Receive a datagram without waiting. *size_bytes is the size of header and payload. Return 0 or an errno: EAGAIN if
// there is no datagram, EPERM if the sender does not have the secret or the datagram is too short or too long.
int receive_fabric_datagram(int socket, const iovec& header, const iovec& payload, std::size_t* size_bytes);

// Exchange the proofs on an accepted connection. Return false if the client does not have the secret.
bool authenticate_client(int socket);

} // namespace gdrkit::twin
