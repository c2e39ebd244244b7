// What the loop is told by its owner, and what it tells back.
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

// What one NIC calls the first byte of a buffer, and the key to it.
struct Key {
    std::uint64_t address = 0;
    std::uint32_t rkey = 0;
};

struct BufferSpec {
    Id id{};
    std::uint64_t length = 0;
    std::uint64_t block_bytes = 0;   // An operation stays inside one block; 0: there are none.
    std::vector<Key> keys;           // By the number of the NIC.
    std::vector<std::uint16_t> near; // Numbers of the NICs to prefer; empty: all are as good.
};

// A file is known to the server by one handle for each right, so that a right is held by the handle and by the agent.
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
    int io_depth = 0; // > 0: batches of exactly that; 0: whatever is there; < 0: at most that, held until the timeout.
    int priority = 1; // 0 high, 1 normal, 2 low
    std::chrono::milliseconds timeout{0};
    std::uint64_t flags = 0;
};

struct Options {
    std::chrono::microseconds spin{50};
    std::size_t outstanding_max = 4096;
    // A server that has operations and gives no result at all for so long is taken for hung.
    std::chrono::milliseconds silence{60000};
};

struct Statistics {
    std::uint64_t operations = 0; // Sent to the server.
    std::uint64_t completions = 0;
    std::uint64_t bytes = 0;
    std::uint64_t refused = 0; // Entries that were answered without the server.
    std::uint64_t failed = 0;  // Results that are an errno.
    std::uint64_t batches = 0; // Frames.
    std::uint64_t sleeps = 0;
    std::uint64_t broken_rings = 0;
    std::uint64_t disconnects = 0;
    std::uint64_t outstanding = 0; // Now.
};

// What the owner must look at. A ring that broke is not served any more; a connection that broke, or whose server is
// silent, still has its operations in flight, until the owner has made sure that the server cannot reach memory and
// calls disconnect().
struct Event {
    enum class Kind : std::uint8_t { ring_broken = 1, disconnected = 2, silent = 3 } kind{};
    std::uint64_t client = 0;
    Id id{};
    std::uint64_t generation = 0; // Of the connection.
};

} // namespace gdrkit::usrbio::agent
