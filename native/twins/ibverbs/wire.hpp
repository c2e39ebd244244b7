// Messages between two queue pairs. A connection starts with a ConnectRequest, the descriptors of the shared memory and
// of the pipe (link.hpp), and a ConnectReply. After that, requests and responses are in the shared memory. The socket
// then carries only wake-ups, and the end of file on the socket means that the peer is gone. Queue pairs on two
// machines have no shared memory, so their socket carries the requests and responses (tcp_link.hpp). A message larger
// than a chunk is sent as several requests.
//
// Both sides have the same version and byte order, so the structures are sent as they are in memory. The magic number
// and the checks of sizes detect peers that do not speak this protocol.
#pragma once

#include <cstdint>
#include <string>

#include "ibverbs/abi.hpp"
#include "ibverbs/bounce_buffer.hpp"

namespace gdrkit::twin::verbs::wire {

inline constexpr std::uint32_t magic = 0x47525143; // "CQRG" in memory
inline constexpr std::uint32_t version = 4;

struct ConnectRequest {
    std::uint32_t magic;
    std::uint32_t version;
    ibv_gid source_gid;
    ibv_gid destination_gid;
    std::uint32_t source_qpn;
    std::uint32_t destination_qpn;
    // Packet sequence number (PSN) of the first packet, and type of the source's GID. The peer refuses values that it
    // does not expect, because on hardware the packets would not arrive.
    std::uint32_t psn;
    std::uint32_t gid_type;
    // Type of the source (ibv_qp_type). The peer refuses a type that does not match its own.
    std::uint32_t qp_type;
    std::uint32_t reserved;
};
static_assert(sizeof(ConnectRequest) == 64);

struct ConnectReply {
    std::uint32_t magic;
    // 1: the queue pair accepts this peer. 0: it refuses the peer; on hardware it would drop the peer's packets.
    std::uint32_t is_accepted;
    // A random number, and its address in the responder's process. A requester that reads this number at this address
    // of the peer's process knows that it can access the memory of the right process (peer_memory.hpp).
    std::uint64_t probe_address;
    std::uint64_t probe_value;
    // Index of the responder's device.
    std::uint32_t device_index;
    std::uint32_t reserved;
};
static_assert(sizeof(ConnectReply) == 32);

enum class Opcode : std::uint16_t { send, write, read, compare_and_swap, fetch_and_add };

inline constexpr std::uint16_t flag_immediate = 1;
inline constexpr std::uint16_t flag_solicited = 2;
// The payload of this chunk is in the pipe of the connection (link.hpp), not in the shared memory.
inline constexpr std::uint16_t flag_piped = 4;
// The member `immediate_data` of this send is an rkey that the receiver invalidates.
inline constexpr std::uint16_t flag_invalidate = 8;

struct Request {
    std::uint32_t magic;
    Opcode opcode;
    std::uint16_t flags;
    // Address and length of the whole message, and the position of this chunk in it.
    std::uint64_t remote_address;
    std::uint64_t message_bytes;
    std::uint64_t chunk_offset_bytes;
    std::uint32_t chunk_bytes;
    std::uint32_t rkey;
    std::uint32_t immediate_data;
    // Offset of this chunk's payload in the shared memory: the source of a send or write, the destination of a read.
    std::uint32_t payload_offset;
    // For an atomic request: the value to compare with or to add, and the value that a successful comparison stores.
    std::uint64_t compare_or_add;
    std::uint64_t swap;
    // Number of the shared receive queue to which an XRC request goes; 0 for other transports.
    std::uint32_t srq_number;
    std::uint32_t reserved;
};
static_assert(sizeof(Request) == 72);

enum class Status : std::uint32_t { done, receiver_not_ready, invalid_request, access_refused, operation_failed };

struct Response {
    std::uint32_t magic;
    Status status;
    // For receiver_not_ready: the min_rnr_timer code of the time to wait.
    std::uint32_t rnr_timer;
    // For a read: number of payload bytes that the responder returns.
    std::uint32_t payload_bytes;
    // For an atomic request: the old value.
    std::uint64_t original_value;
};
static_assert(sizeof(Response) == 24);

// Return a response without payload.
Response make_response(Status status);

// Return the name of the socket on which a queue pair listens: "qp.", the GID, "." and the queue pair number, both in
// hexadecimal digits.
std::string make_socket_name(const ibv_gid& gid, std::uint32_t qp_num);

// Return whether a message has the magic number, consistent sizes and numbers within bounds, and no unknown flag.
bool is_well_formed(const ConnectRequest& connect_request);
bool is_well_formed(const Request& request);
bool is_well_formed(const Response& response, const Request& request);

inline bool is_last_chunk(const Request& request) {
    return request.chunk_offset_bytes + request.chunk_bytes == request.message_bytes;
}

inline bool carries_payload(Opcode opcode) {
    return opcode == Opcode::send || opcode == Opcode::write;
}

} // namespace gdrkit::twin::verbs::wire
