// Types that the agent (in Python) and its loop (in C++) exchange: buffers, files, rings and options go to the loop;
// statistics and events come back.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace gdrkit::usrbio::agent {

using Id = std::array<std::uint8_t, 16>; // UUID of a buffer or of a ring.

struct IdHash {
    std::size_t operator()(const Id& id) const noexcept {
        return std::hash<std::string_view>{}({reinterpret_cast<const char*>(id.data()), id.size()});
    }
};

// The remote key of a buffer at one NIC, and the address of the first byte of the buffer for that key.
struct RemoteKey {
    std::uint64_t address = 0;
    std::uint32_t rkey = 0;
};

// A buffer that rings of a client may use. The storage server accesses the buffer by RDMA.
struct BufferSpec {
    Id id{};
    std::uint64_t length = 0;                  // In bytes.
    std::uint64_t block_bytes = 0;             // No operation may cross a multiple of block_bytes; 0: no such limit.
    std::vector<RemoteKey> remote_keys;        // One for each NIC of the agent, in the order of the agent's NICs.
    std::vector<std::uint16_t> preferred_nics; // Indices into `remote_keys`; empty: no preference.
    // Address of the buffer in this process. The agent unmaps the buffer only after the loop has removed it. 0: the
    // buffer is not mapped, or the loop must not use the mapping.
    std::uintptr_t mapping = 0;
};

// A file that rings of a client may use. The loop checks for each operation whether the file may be read or written.
// The storage server checks this too, because it has separate handles for reading and for writing.
struct FileSpec {
    std::uint64_t inode = 0;
    std::uint64_t read_handle = 0;
    std::uint64_t write_handle = 0;
    bool readable = false; // Whether rings for reads may use the file.
    bool writable = false; // Whether rings for writes may use the file.
};

inline constexpr int priority_class_count = 3; // high, normal, low

struct RingSpec {
    Id id{};
    bool for_read = true; // False: a ring for writes.
    // Number of entries that the loop takes at once. > 0: exactly io_depth entries. 0: all available entries. < 0: at
    // most -io_depth entries; if there are fewer, the loop first waits for `timeout`.
    int io_depth = 0;
    int priority = 1; // 0 high, 1 normal, 2 low
    std::chrono::milliseconds timeout{0};
    std::uint64_t flags = 0; // HF3FS_IOR_* of hf3fs_usrbio.h.
};

struct Options {
    std::chrono::microseconds spin_time{50}; // Time without work after which the loop sleeps.
    std::size_t outstanding_max = 4096;      // Largest number of operations in flight.
    // If operations are in flight and the server returns no result for this time, the loop reports the event `silent`.
    std::chrono::milliseconds server_timeout{60000};
};

struct Statistics {
    std::uint64_t operations = 0;  // Operations sent to the server, or executed by the loop.
    std::uint64_t local_reads = 0; // Operations executed by the loop: reads of bytes in the page cache.
    std::uint64_t completions = 0;
    std::uint64_t bytes = 0;   // Bytes read or written.
    std::uint64_t refused = 0; // Invalid ring entries, which the loop completed with an error and did not send.
    std::uint64_t failed = 0;  // Operations whose result is a negative errno.
    std::uint64_t batches = 0; // Frames sent to the server.
    std::uint64_t sleeps = 0;  // Number of times that the loop has slept.
    std::uint64_t broken_rings = 0;
    std::uint64_t disconnects = 0; // Connections to the server that were lost, or that the agent ended.
    std::uint64_t outstanding = 0; // Operations in flight now.
};

// An event that the agent must handle. After `ring_broken`, the loop no longer serves the ring `id`, because its memory
// is missing or contains invalid values. `disconnected`: the connection to the storage server has ended. `silent`: the
// server returns no results. After these two events, the operations of the connection stay in flight. The agent first
// makes sure that the server cannot access memory any more. Then it calls disconnect(), which ends the operations.
struct Event {
    enum class Kind : std::uint8_t { ring_broken = 1, disconnected = 2, silent = 3 } kind{};
    std::uint64_t client = 0;     // Number of the client of the broken ring.
    Id id{};                      // Id of the broken ring.
    std::uint64_t generation = 0; // The `generation` with which the agent called connect() for the lost connection.
};

} // namespace gdrkit::usrbio::agent
