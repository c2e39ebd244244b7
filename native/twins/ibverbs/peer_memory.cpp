// Copies to and from the memory of a peer process, as far as the peer's grants (permissions for regions) allow.

#include "ibverbs/peer_memory.hpp"

#include <array>

#include "ibverbs/port_counters.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Return where the range begins in the address space of the peer's process; nullopt if the grant does not cover the
// range.
std::optional<std::uint64_t> translate(const Grant& grant, const PeerRange& range) {
    if (grant.is_valid == 0 || grant.rkey != range.rkey || (grant.access & range.access) == 0 ||
        range.address < grant.begin || range.size_bytes > grant.length_bytes ||
        range.address - grant.begin > grant.length_bytes - range.size_bytes) {
        return std::nullopt;
    }
    return grant.mapped_address + (range.address - grant.begin);
}

bool is_read(const PeerRange& range) {
    return range.access == IBV_ACCESS_REMOTE_READ;
}

} // namespace

std::unique_ptr<PeerMemory> PeerMemory::open(int socket, const wire::ConnectReply& reply, GrantTable* grants) {
    const int process_id = get_peer_process_id(socket);
    // The reply has the address and the value of a variable of the peer. Reading the value shows that the system
    // permits the access, and that the process id is the right one.
    std::uint64_t read_value = 0;
    const PeerCopy probe{process_id, true, reinterpret_cast<std::byte*>(&read_value), reply.probe_address,
                         sizeof read_value};
    if (process_id <= 0 || !copy_with_peer(probe) || read_value != reply.probe_value) {
        return nullptr;
    }
    return std::unique_ptr<PeerMemory>(new PeerMemory(process_id, reply.device_index, grants));
}

// Return the slot of a grant that covers the range. Requests mostly use the same region again, so the search starts at
// the slot that was found last.
std::optional<std::uint32_t> PeerMemory::find_slot(const PeerRange& range) {
    for (std::uint32_t tried_count = 0; tried_count < GrantTable::slot_count && !has_failed_; ++tried_count) {
        const std::uint32_t slot = (last_slot_ + tried_count) % GrantTable::slot_count;
        if (translate(grants_->grants[slot], range)) {
            last_slot_ = slot;
            return slot;
        }
    }
    return std::nullopt;
}

// Mark a grant for the range as used, so that the responder waits before it revokes the grant, and call copy(grant,
// address in the peer's process). Return false if there is no grant or the copy fails.
template <typename Copy> bool PeerMemory::use_grant(const PeerRange& range, Copy copy) {
    const std::optional<std::uint32_t> slot = find_slot(range);
    if (!slot) {
        return false;
    }
    const Grant& grant = grants_->grants[*slot];
    grants_->used_slot = *slot + 1;
    // The grant may have been revoked since find_slot.
    const std::optional<std::uint64_t> address = translate(grant, range);
    has_failed_ = address && !copy(grant, *address);
    grants_->used_slot = 0;
    return address && !has_failed_;
}

bool PeerMemory::copy(const PeerRange& range, std::byte* local_address, ParallelCopy* parallel_copy) {
    return use_grant(range, [&](const Grant&, std::uint64_t address) {
        return parallel_copy->run(
            {process_id_, is_read(range), local_address, address, static_cast<std::size_t>(range.size_bytes)});
    });
}

bool PeerMemory::copy_list(std::span<const PeerRange> ranges, std::span<const iovec> local_ranges) {
    std::array<iovec, max_list_length> remote_ranges;
    bool covers_all = true;
    const bool has_copied = use_grant(ranges.front(), [&](const Grant& grant, std::uint64_t) {
        for (std::size_t index = 0; index < ranges.size() && covers_all; ++index) {
            const std::optional<std::uint64_t> address = translate(grant, ranges[index]);
            covers_all = address.has_value();
            remote_ranges[index] = {reinterpret_cast<void*>(address.value_or(0)), ranges[index].size_bytes};
        }
        // If a range is not granted, copy nothing. This is not a failed copy, so the grants remain usable.
        return !covers_all || copy_lists_with_peer(process_id_, is_read(ranges.front()), local_ranges,
                                                   std::span(remote_ranges).first(ranges.size()));
    });
    return has_copied && covers_all;
}

void PeerMemory::count_request(const PeerRange& range) {
    grants_->request_count.fetch_add(1, std::memory_order_relaxed);
    (is_read(range) ? grants_->read_bytes : grants_->write_bytes)
        .fetch_add(range.size_bytes, std::memory_order_relaxed);
    count_at_port(device_index_, is_read(range) ? PortDirection::sent : PortDirection::received, range.size_bytes);
}

} // namespace gdrkit::twin::verbs
