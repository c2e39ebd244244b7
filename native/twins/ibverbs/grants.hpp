// Grants. With a grant from the responder, the requester of a connection copies directly to and from a region in the
// responder's process, without a thread of the responder. The responder gives a grant after it has served a request to
// the region. Before a change of the region, or of the permissions or the state of the queue pair, the responder
// revokes the grant and waits for the end of a running copy.
//
// A grant gives the requester no new power: the system lets a process access the memory of another process only if it
// may debug that process (ptrace). A requester that ignores the table can harm only programs of its own user.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "ibverbs/device.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin::verbs {

class Region;

struct Grant {
    std::atomic<std::uint32_t> is_valid{0};
    std::uint32_t rkey = 0;
    // Requests address the region by the range [begin, begin + length_bytes). `mapped_address` is the address of the
    // first byte of the region in the responder's process.
    std::uint64_t begin = 0, length_bytes = 0, mapped_address = 0;
    std::uint32_t access = 0; // the permitted flags among IBV_ACCESS_REMOTE_WRITE and IBV_ACCESS_REMOTE_READ
};

// The grants of a connection, in its shared memory. A requester stores the slot that it will use and then loads
// `is_valid`. A responder clears `is_valid` and then loads the slot in use. All four accesses are sequentially
// consistent. So either the requester sees that the grant is revoked, or the responder sees that it is in use.
struct GrantTable {
    static constexpr std::uint32_t slot_count = 64;
    // The requester writes these: the slot that it uses, counted from 1 (0: none), and the numbers of requests and
    // bytes that it has copied.
    alignas(64) std::atomic<std::uint32_t> used_slot{0};
    std::atomic<std::uint64_t> request_count{0}, write_bytes{0}, read_bytes{0};
    // The responder writes the grants.
    alignas(64) Grant grants[slot_count];
};

// Gives and revokes the grants of one connection, for the responder.
class GrantIssuer : public std::enable_shared_from_this<GrantIssuer> {
public:
    // The caller keeps `table` valid until close(). Return nullptr if this process cannot observe whether the
    // requester's process lives.
    static std::shared_ptr<GrantIssuer> make(GrantTable* table, int requester_process_id, Device* device);
    ~GrantIssuer();
    GrantIssuer(const GrantIssuer&) = delete;
    GrantIssuer& operator=(const GrantIssuer&) = delete;

    [[nodiscard]] bool has_granted(std::uint32_t rkey);
    // Grant this access to the region, in place of the oldest grant if the table is full. A region whose memory is not
    // mapped is not granted.
    void grant(Region* region, unsigned access);
    // Revoke grants. After these calls the requester does not access the memory any more.
    void revoke(std::uint32_t rkey);
    void revoke_all();
    // Revoke all grants, and do not use the table after this call.
    void close();
    // Add to the device's served traffic the requests and bytes that the requester has copied since the last call.
    void collect_traffic();

private:
    GrantIssuer(GrantTable* table, Fd requester_pidfd, Device* device)
        : table_(table), requester_pidfd_(std::move(requester_pidfd)), device_(device) {}
    void revoke_slot(std::uint32_t slot);
    void wait_until_unused(std::uint32_t slot);

    std::mutex mutex_; // a thread that also locks a region locks this mutex first
    GrantTable* table_;
    const Fd requester_pidfd_; // is readable when the requester's process has ended
    Device* const device_;
    // Keys of the grants that this process has given; 0: the slot is free. The table itself is not trusted, because the
    // peer can write it.
    std::array<std::uint32_t, GrantTable::slot_count> granted_rkeys_{};
    std::uint32_t grant_count_ = 0; // grants given so far; modulo slot_count, it is the slot of the next grant
    // True if the requester's process has ended or is considered stopped. Then no revocation waits for it any more.
    bool is_requester_gone_ = false;
    // Values of the requester's counters at the last collect_traffic().
    std::uint64_t collected_requests_ = 0, collected_write_bytes_ = 0, collected_read_bytes_ = 0;
};

// Call collect_traffic() of all open issuers of this process.
void collect_granted_traffic();

} // namespace gdrkit::twin::verbs
