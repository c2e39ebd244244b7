// The wire format between a client of the storage service (a usrbio agent or a StorageClient) and its server. All
// numbers are little endian. gdrkit/storage/wire.py declares the same format in Python, and the tests compare both with
// suites/vectors.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace gdrkit::storage {

static_assert(std::endian::native == std::endian::little, "the structs below are the bytes on the wire");

inline constexpr std::uint32_t frame_magic = 0x53524447; // "GDRS" in memory.
inline constexpr std::uint16_t frame_version = 1;
inline constexpr std::uint32_t control_bytes_max = 65536; // Largest payload of a control frame.
inline constexpr std::uint32_t operations_max = 1024;     // Largest number of operations or results in a frame.

enum class FrameType : std::uint16_t { control_request = 1, control_reply = 2, io_request = 3, io_reply = 4 };

struct FrameHeader {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t type;
    std::uint32_t length; // Length of the payload, in bytes.
    std::uint32_t count;  // Number of operations or results. 0 in a control frame.
    // The client chooses this number, and the control reply repeats it. The sequence of an io_reply is 0, because each
    // result has a tag.
    std::uint64_t sequence;
    std::uint32_t payload_crc32c;
    std::uint32_t header_crc32c; // CRC32C of the first 28 bytes of the header.
};
static_assert(sizeof(FrameHeader) == 32 && offsetof(FrameHeader, sequence) == 16 &&
              offsetof(FrameHeader, header_crc32c) == 28);

enum class Opcode : std::uint8_t { read = 1, write = 2 };

// Flags of an operation.
inline constexpr std::uint8_t forbid_holes = 1; // A read of a range that has a hole fails with -ENODATA.
// `checksum` of the operation is valid. If the written bytes have another CRC32C, the write fails with -EBADMSG and
// changes nothing.
inline constexpr std::uint8_t checksum_given = 2;
inline constexpr std::uint8_t checksum_wanted = 4; // The result has the CRC32C of the moved bytes.
// The result lists the holes of the range, and the server does not write zeros for the holes to the client's memory.
inline constexpr std::uint8_t report_holes = 8;

// A read or write in an io_request. For a read, the server sends bytes of the file to the client's memory by RDMA
// WRITE. For a write, the server fetches the bytes from the client's memory by RDMA READ.
struct Operation {
    std::uint64_t tag;    // The client chooses the tag, and the result repeats it.
    std::uint64_t handle; // Handle of the open file.
    std::uint64_t file_offset;
    std::uint64_t length;
    std::uint64_t remote_address; // Address of the client's memory, which has the key `rkey`.
    std::uint32_t rkey;
    std::uint16_t queue_pair; // Index of the session's queue pair for the transfer.
    std::uint8_t opcode;
    std::uint8_t flags;
    std::uint32_t checksum;  // CRC32C of the bytes to write, or 0 without checksum_given.
    std::uint32_t reserved0; // The reserved fields must be 0.
    std::uint64_t reserved1;
};
static_assert(sizeof(Operation) == 64 && offsetof(Operation, rkey) == 40 && offsetof(Operation, checksum) == 48);

inline constexpr std::uint32_t checksum_valid = 1; // A flag of a result: `checksum` is valid.

// An io_reply consists of `count` results in the order of completion, and then all their hole extents in the same
// order.
struct Result {
    std::uint64_t tag;
    std::int64_t result;    // Number of moved bytes (fewer than requested at the end of the file), or -errno.
    std::uint32_t checksum; // CRC32C of the moved bytes, if `flags` has checksum_valid.
    std::uint32_t flags;
    std::uint32_t holes; // Number of the result's HoleExtents in the frame.
    std::uint32_t reserved;
};
static_assert(sizeof(Result) == 32 && offsetof(Result, holes) == 24);

struct HoleExtent {
    std::uint64_t offset; // Offset from the first byte of the operation.
    std::uint64_t length;
};
static_assert(sizeof(HoleExtent) == 16);

} // namespace gdrkit::storage
