// What two queue pairs say to one another. A connection begins with Hello, the descriptors of what both share
// (link.hpp) and Welcome; from then on requests and their responses lie in shared memory, and the socket only carries
// wake-ups and the end. A message larger than a chunk is several requests. Both sides are of one build and one machine,
// so the structures travel as they are; a stranger who connects is told from a peer by the magic number and by sizes
// that must fit.
#pragma once

#include <cstdint>
#include <string>

#include "ibverbs/abi.hpp"
#include "ibverbs/bounce.hpp"

namespace gdrkit::twin::verbs::wire {

inline constexpr std::uint32_t magic = 0x47525143; // "CQRG"
inline constexpr std::uint32_t version = 2;

struct Hello {
    std::uint32_t magic;
    std::uint32_t version;
    ibv_gid source_gid;
    ibv_gid destination_gid;
    std::uint32_t source_qpn;
    std::uint32_t destination_qpn;
    // The first packet's number, and the kind of the source's GID: where the other side expects another, packets would
    // not arrive.
    std::uint32_t psn;
    std::uint32_t gid_type;
};
static_assert(sizeof(Hello) == 56);

struct Welcome {
    std::uint32_t magic;
    // 1: the queue pair is ready for this peer; 0: packets of this peer would be dropped.
    std::uint32_t ready;
};
static_assert(sizeof(Welcome) == 8);

enum class Opcode : std::uint16_t { send, write, read, compare_and_swap, fetch_and_add };

inline constexpr std::uint16_t flag_immediate = 1;
inline constexpr std::uint16_t flag_solicited = 2;
// The payload of this part of a write lies in the pipe, not in the shared memory.
inline constexpr std::uint16_t flag_piped = 4;

struct Request {
    std::uint32_t magic;
    Opcode opcode;
    std::uint16_t flags;
    // The whole message, and which part of it this is.
    std::uint64_t remote_address;
    std::uint64_t message_bytes;
    std::uint64_t chunk_offset_bytes;
    std::uint32_t chunk_bytes;
    std::uint32_t rkey;
    std::uint32_t immediate;
    // Where in the shared memory the chunk_bytes of this part are (send, write) or are wanted (read).
    std::uint32_t payload_at;
    std::uint64_t compare_or_add;
    std::uint64_t swap;
};
static_assert(sizeof(Request) == 64);

enum class Answer : std::uint32_t { done, receiver_not_ready, invalid_request, access_refused, operation_failed };

struct Response {
    std::uint32_t magic;
    Answer answer;
    // With receiver_not_ready: the code of the time to wait.
    std::uint32_t rnr_timer;
    // Of a read: how much of it now lies in the shared memory.
    std::uint32_t payload_bytes;
    // What an atomic request found.
    std::uint64_t original;
};
static_assert(sizeof(Response) == 24);

// Without payload.
Response response_of(Answer answer);

// The abstract name at which a queue pair listens.
std::string name_of(const ibv_gid& gid, std::uint32_t qp_num);

// Whether the sizes fit one another and a chunk, and nothing is there that has no meaning.
bool well_formed(const Hello& hello);
bool well_formed(const Request& request);
bool well_formed(const Response& response, const Request& request);

inline bool last_chunk(const Request& request) {
    return request.chunk_offset_bytes + request.chunk_bytes == request.message_bytes;
}

inline bool carries_payload(Opcode opcode) {
    return opcode == Opcode::send || opcode == Opcode::write;
}

} // namespace gdrkit::twin::verbs::wire
