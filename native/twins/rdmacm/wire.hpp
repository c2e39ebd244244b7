// The messages between the connection managers of two processes. All messages have the same size. A receiver does not
// trust the peer, so it checks each message with is_valid().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace gdrkit::twin::rdmacm::wire {

inline constexpr std::uint32_t magic = 0x4d434431; // "1DCM" in memory
inline constexpr std::uint16_t version = 1;

// The types of messages. In the same order, the messages of the InfiniBand communication manager with these roles are
// REQ, REP, RTU, REJ, DREQ, DREP, SIDR_REQ and SIDR_REP.
enum class Type : std::uint16_t {
    request = 1,
    reply,
    ready_to_use,
    reject,
    disconnect_request,
    disconnect_reply,
    datagram_request,
    datagram_reply,
};

struct Message {
    std::uint32_t magic;
    std::uint16_t version;
    Type type;
    std::uint32_t port_space;
    std::uint32_t qp_num;
    std::uint32_t psn;
    std::uint32_t qkey;
    std::uint32_t reason;             // the reason of a rejection, or the status of a datagram reply
    std::uint16_t family;             // AF_INET or AF_INET6, of both addresses
    std::uint16_t src_port, dst_port; // host byte order
    std::uint8_t qp_type;
    std::uint8_t responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq;
    std::uint8_t private_bytes; // number of used bytes of private_data
    std::array<std::uint8_t, 2> reserved;
    std::array<std::uint8_t, 16> src_ip, dst_ip, src_gid, dst_gid; // an IPv4 address is IPv4-mapped
    std::array<std::uint8_t, 224> private_data;
};
static_assert(sizeof(Message) == 4 * 7 + 6 + 10 + 4 * 16 + 224);

// The sizes in bytes of the private data field, which equal the sizes in InfiniBand messages. Like an event of the
// kernel, an event of the twin always has the whole field, padded with zeros. The 36 bytes are the part of the field
// that the RDMA connection manager uses in a request, for its own header with ports and IP addresses.
inline constexpr std::size_t request_private_bytes = 92 - 36;
inline constexpr std::size_t reply_private_bytes = 196;
inline constexpr std::size_t reject_private_bytes = 148;
inline constexpr std::size_t datagram_request_private_bytes = 216 - 36;
inline constexpr std::size_t datagram_reply_private_bytes = 136;

// Return the size of the private data field of this message type, or 0 if the type has no private data.
std::size_t get_private_field_bytes(Type type);

// Return whether all fields of a received message have values that a connection manager of this version sends.
bool is_valid(const Message& message);

} // namespace gdrkit::twin::rdmacm::wire
