// Direct access of the requester of a queue pair to the memory of the peer process. The responder in that process
// grants the access for each region (grants.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "ibverbs/grants.hpp"
#include "ibverbs/parallel_copy.hpp"
#include "ibverbs/wire.hpp"

namespace gdrkit::twin::verbs {

// The range of a peer's memory to which a request refers, and the access that it needs: IBV_ACCESS_REMOTE_WRITE or
// IBV_ACCESS_REMOTE_READ.
struct PeerRange {
    std::uint32_t rkey;
    unsigned access;
    std::uint64_t address;
    std::uint64_t size_bytes;
};

class PeerMemory {
public:
    // Largest number of ranges of one copy_list().
    static constexpr std::size_t max_list_length = 32;

    // Prepare access to the memory of the peer to which `socket` is connected. Return nullptr if the system does not
    // permit the access.
    static std::unique_ptr<PeerMemory> open(int socket, const wire::ConnectReply& reply, GrantTable* grants);

    // Return whether there is a grant for the range.
    [[nodiscard]] bool is_granted(const PeerRange& range) { return find_slot(range).has_value(); }
    // Copy between the range and the memory at `local_address`. Return false if the range is not granted or the copy
    // fails. After a failed copy no range is granted any more.
    bool copy(const PeerRange& range, std::byte* local_address, ParallelCopy* parallel_copy);
    // Copy several ranges to or from `local_ranges` with one system call. All ranges have the same key and access.
    // Return false as copy() does.
    bool copy_list(std::span<const PeerRange> ranges, std::span<const iovec> local_ranges);
    // Count a request that copy() or copy_list() has carried out, in the counters of the peer and of its port.
    void count_request(const PeerRange& range);

private:
    PeerMemory(int process_id, unsigned device_index, GrantTable* grants)
        : process_id_(process_id), device_index_(device_index), grants_(grants) {}
    std::optional<std::uint32_t> find_slot(const PeerRange& range);
    template <typename Copy> bool use_grant(const PeerRange& range, Copy copy);

    const int process_id_;
    const unsigned device_index_;
    GrantTable* const grants_;
    std::uint32_t last_slot_ = 0;
    bool has_failed_ = false;
};

} // namespace gdrkit::twin::verbs
