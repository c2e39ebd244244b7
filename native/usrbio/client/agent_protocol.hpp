// Messages between the client library and the agent on <mount>/3fs-virt/agent.sock (SOCK_SEQPACKET).
//
// A message is one header and its payload. A reply has the type and the sequence of its request. Both ends are on one
// host, so numbers have the byte order of the host. gdrkit/usrbio/agent/protocol.py is the agent's implementation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio {

inline constexpr std::uint32_t agent_magic = 0x41524447; // "GDRA" in memory.
inline constexpr std::uint16_t agent_version = 1;
inline constexpr std::size_t agent_message_bytes_max = 32768;
inline constexpr std::size_t agent_descriptors_max = 2;

// The types of requests. The comments have the form: payload of the request; descriptors -> payload of the reply.
// "Hello" and "Publish" are the structures AgentHello and AgentPublish below. "u16 length" is the length of the name
// that follows. "(status)" means that the reply has only the status in its header. A client borrows memory that another
// client of the same user has published.
enum class AgentRequest : std::uint16_t {
    hello = 1,           // Hello -> Hello
    publish = 2,         // Publish, name, target, share handle; descriptors -> (status)
    unpublish = 3,       // u16 length, name -> (status)
    register_file = 4,   // u64 flags; one descriptor -> u64 inode
    deregister_file = 5, // u64 inode -> (status)
    punch_hole = 6,      // u64 flags, u32 count, u32 0, count x (u64 begin, u64 end); one descriptor -> (status)
    hard_link = 7, // u16 length, name of the new link in the folder; two descriptors: file (O_PATH), folder (O_PATH) ->
                   // (status)
    borrow = 8,    // Publish (share handle: 0 bytes), name and target of the other client's publication -> (status)
    return_borrowed = 9, // u16 length, name; once for each borrow -> (status)
    // The requests below need agent_feature_keep.
    unpublish_and_keep = 10, // u16 length, name -> u64: 1 if the agent keeps the registration, 0 if it has ended it
    drop_kept = 11,          // u64 0; one descriptor (the kept dma-buf or file) -> (status)
};

// Bits of AgentHello::features.
//
// agent_feature_keep: the agent can keep the registration of a dma-buf between two publications of a client. A later
// publish with the same dma-buf (fstat: st_dev, st_ino), offset, length and target allocation uses the kept
// registration. The share handle may describe a longer range than the link target does; the iov is then the beginning
// of that longer range. The agent ends a kept registration on drop_kept, and when the client's connection ends. The
// agent can also keep the registration of host memory, which it identifies by device, inode and length. As long as the
// agent keeps the registration, the file keeps its name in /dev/shm. When the agent ends the registration, it removes
// the name.
inline constexpr std::uint64_t agent_feature_keep = 1;

struct AgentHeader {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t type;        // AgentRequest
    std::uint32_t length;      // Length of the payload, in bytes.
    std::uint32_t descriptors; // Number of file descriptors that come with the message (SCM_RIGHTS).
    std::uint64_t sequence;
    std::int32_t status; // In a reply: 0 or a positive errno; after an error the payload is a sentence in UTF-8 with
                         // the reason. In a request: 0.
    std::uint32_t reserved;
};
static_assert(sizeof(AgentHeader) == 32 && offsetof(AgentHeader, sequence) == 16 &&
              offsetof(AgentHeader, status) == 24);

struct AgentHello {
    std::uint64_t features; // Feature bits of the sender; the library sends 0.
    std::uint32_t pid;      // For the log only. The agent trusts the credentials that the kernel reports.
    std::uint32_t reserved;
    char library[32]; // Name and version, padded with zeros.
};
static_assert(sizeof(AgentHello) == 48);

// The name, the target and the share handle follow without gaps. The share handle (gdrkit/registration/handle.py)
// describes device memory and the descriptors that come with it. For host memory, the share handle has 0 bytes and the
// target is a path in /dev/shm. If a message for host memory carries a descriptor, the memory has no name yet, and the
// agent creates the name that the target gives.
struct AgentPublish {
    std::uint16_t name_bytes;
    std::uint16_t target_bytes;
    std::uint16_t share_handle_bytes;
    std::uint16_t reserved;
};
static_assert(sizeof(AgentPublish) == 8);

} // namespace gdrkit::usrbio
