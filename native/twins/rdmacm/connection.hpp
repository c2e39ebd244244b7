// A connection between two identifiers: the socket to the peer's connection manager, and the messages on it.
#pragma once

#include "rdmacm/identifier.hpp"

namespace gdrkit::twin::rdmacm {

// Reasons of rejections (IB_CM_REJ_* in the kernel's ib_cm.h) and statuses of datagram replies (IB_SIDR_*).
inline constexpr int rejected_no_listener = 8; // IB_CM_REJ_INVALID_SERVICE_ID
inline constexpr int rejected_by_program = 28; // IB_CM_REJ_CONSUMER_DEFINED
inline constexpr int datagram_unsupported = 1; // IB_SIDR_UNSUPPORTED
inline constexpr int datagram_rejected = 2;    // IB_SIDR_REJECT

// The progress of a connection, from the side of this process.
enum class Phase {
    waits_for_request,
    waits_for_reply,
    received_request,
    sent_reply,
    received_reply,
    established,
    sent_disconnect,
    received_disconnect,
    ended
};

struct Connection : std::enable_shared_from_this<Connection> {
    Fd socket;
    Identifier* id = nullptr; // nullptr after the identifier was destroyed, and before the request of a peer
    std::shared_ptr<Identifier*> listener; // set until the request of the peer has arrived
    Phase phase = Phase::waits_for_reply;
    Token watch_token = 0, timer_token = 0;
    // The message that is being received, and the number of its bytes that have arrived.
    wire::Message incoming_message{};
    std::size_t incoming_bytes = 0;
};

// Start to read the messages of the peer.
void start_reading(const std::shared_ptr<Connection>& connection);
// End the connection without a message. The peer sees the end of file.
void close_connection(Connection* connection);
// Send a message. If this fails, shut down the socket, so that the manager handles the end of file.
void send_message(Connection* connection, const wire::Message& message);
// Return a message of this type from the identifier, with its addresses. Return nullopt if the private data is too
// long.
std::optional<wire::Message> make_message(const Identifier& id, wire::Type type, const void* private_data = nullptr,
                                          std::size_t private_bytes = 0);
// Send a disconnect request, or the reply to the peer's request. Return whether the identifier has or had an
// established connection.
bool disconnect(Identifier* id);
// Close the listeners of an identifier that is destroyed, release its port, and end its connection.
void close_identifier(Identifier* id);

// Open the sockets at which requests for the listening identifier arrive. Return 0 or an errno.
int open_listeners(Identifier* id);
// Connect to the listener of a destination. Return a socket or -errno: -ECONNREFUSED if no process listens. The caller
// does not hold the lock of the manager.
int connect_to_listener(rdma_port_space port_space, const ibv_gid& gid, const IpAddress& address, std::uint16_t port);

} // namespace gdrkit::twin::rdmacm
