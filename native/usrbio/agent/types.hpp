// Values that the agent passes to its loop, and that the loop reports.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace gdrkit::usrbio::agent {

using Id = std::array<std::uint8_t, 16>;

struct IdHash {
    std::size_t operator()(const Id& id) const noexcept {
        return std::hash<std::string_view>{}({reinterpret_cast<const char*>(id.data()), id.size()});
    }
};

// Address of the first byte of a buffer at one NIC, and the key for it.
struct Key {
    std::uint64_t address = 0;
    std::uint32_t rkey = 0;
};

struct BufferSpec {
    Id id{};
    std::uint64_t length = 0;
    std::uint64_t block_bytes = 0;             // No operation may cross a multiple of it; 0: no such limit.
    std::vector<Key> keys;                     // Indexed by the number of the NIC.
    std::vector<std::uint16_t> preferred_nics; // Numbers of the preferred NICs; empty: no preference.
};

// The server knows a file by one handle for each permission, so that both the handle and the agent enforce a
// permission.
struct FileSpec {
    std::uint64_t inode = 0;
    std::uint64_t read_handle = 0;
    std::uint64_t write_handle = 0;
    bool readable = false;
    bool writable = false;
};

inline constexpr int priority_classes = 3; // high, normal, low

struct RingSpec {
    Id id{};
    bool for_read = true;
    // > 0: batches of exactly that many; 0: all that is there; < 0: at most that many, held until the timeout.
    int io_depth = 0;
    int priority = 1; // 0 high, 1 normal, 2 low
    std::chrono::milliseconds timeout{0};
    std::uint64_t flags = 0;
};

struct Options {
    std::chrono::microseconds spin{50};
    std::size_t outstanding_max = 4096;
    // A server that has operations and returns no result for this time counts as hung.
    std::chrono::milliseconds silence{60000};
};

struct Statistics {
    std::uint64_t operations = 0; // Sent to the server.
    std::uint64_t completions = 0;
    std::uint64_t bytes = 0;
    std::uint64_t refused = 0; // Entries that were completed with an error, without the server.
    std::uint64_t failed = 0;  // Results that are an errno.
    std::uint64_t batches = 0; // Frames sent to the server.
    std::uint64_t sleeps = 0;
    std::uint64_t broken_rings = 0;
    std::uint64_t disconnects = 0;
    std::uint64_t outstanding = 0; // In flight now.
};

// An event that the agent must handle. The loop serves a broken ring no more. After `disconnected` or `silent`, the
// operations of the connection stay in flight until the agent has ensured that the server cannot access memory, and
// calls disconnect().
struct Event {
    enum class Kind : std::uint8_t { ring_broken = 1, disconnected = 2, silent = 3 } kind{};
    std::uint64_t client = 0;
    Id id{};
    std::uint64_t generation = 0; // Generation of the connection.
};

} // namespace gdrkit::usrbio::agent
