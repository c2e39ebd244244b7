// A connection between two identifiers: the socket to the peer's connection manager, and the messages on it.
#pragma once

#include "rdmacm/identifier.hpp"

namespace gdrkit::twin::rdmacm {

// Reasons of rejections (IB_CM_REJ_* in the kernel's ib_cm.h), and statuses of the replies to datagram requests
// (IB_SIDR_*). The program finds them in the `status` of an event.
inline constexpr int rejected_no_listener = 8; // IB_CM_REJ_INVALID_SERVICE_ID
inline constexpr int rejected_by_program = 28; // IB_CM_REJ_CONSUMER_DEFINED
inline constexpr int datagram_unsupported = 1; // IB_SIDR_UNSUPPORTED
inline constexpr int datagram_rejected = 2;    // IB_SIDR_REJECT

// The progress of a connection, as this process sees it. The active side goes from waits_for_reply to received_reply
// and established, the passive side from waits_for_request to received_request, sent_reply and established. Both then
// go to sent_disconnect or received_disconnect, and to ended. A request for datagrams ends with the reply.
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
    Identifier* id = nullptr; // nullptr before the peer's request arrives, and after rdma_destroy_id
    // Only the passive side has a listener, until the program can take the peer's request. The inner pointer becomes
    // nullptr when the listener is destroyed.
    std::shared_ptr<Identifier*> listener;
    Phase phase = Phase::waits_for_reply;
    Token watch_token = 0, timer_token = 0;
    // The message that is being received, and the number of its bytes that have arrived.
    wire::Message incoming_message{};
    std::size_t incoming_bytes = 0;
};

// The caller of the functions below holds the lock of the manager, except for connect_to_listener.

// Start to read the messages of the peer. In the phase waits_for_reply, also start the timer for the reply.
void start_reading(const std::shared_ptr<Connection>& connection);
// End the connection without a message. The peer reads the end of file from the socket.
void close_connection(Connection* connection);
// Send a message. If this fails, shut down the socket. The manager's thread then reads the end of file and ends the
// connection.
void send_message(Connection* connection, const wire::Message& message);
// Return a message of this type from the identifier to its peer, with the addresses of both. Return nullopt if the
// private data is too long for the type.
std::optional<wire::Message> make_message(const Identifier& id, wire::Type type, const void* private_data = nullptr,
                                          std::size_t private_bytes = 0);
// Send a disconnect request, or the reply to the peer's disconnect request. Return false if there is nothing to
// disconnect: there is no connection, it still waits for a reply or for rdma_accept, or the identifier is for
// datagrams.
bool disconnect(Identifier* id);
// Prepare the destruction of an identifier: close its listening sockets, release its port, and end its connection,
// with a rejection or a disconnect message if the peer expects one.
void close_identifier(Identifier* id);

// Open and watch the sockets at which requests for the listening identifier arrive. Return 0 or EADDRINUSE.
int open_listeners(Identifier* id);
// Connect to the listener of a destination, whose device has the GID `gid`. Return a socket or -errno: -ECONNREFUSED if
// no process listens. The caller must not hold the lock of the manager, because the call may block.
int connect_to_listener(rdma_port_space port_space, const ibv_gid& gid, const IpAddress& address, std::uint16_t port);

} // namespace gdrkit::twin::rdmacm
