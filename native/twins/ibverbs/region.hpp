// Memory regions (MR), and the lkeys and rkeys by which requests refer to them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <vector>

#include "ibverbs/memory.hpp"
#include "ibverbs/pipe.hpp"
#include "ibverbs/protection_domain.hpp"

namespace gdrkit::twin::verbs {

class GrantIssuer;

enum class RegionError {
    none,
    // The key is unknown or belongs to another protection domain, the range is out of bounds, or the access is not
    // permitted.
    refused,
    // The memory of the region is no longer mapped.
    fault,
    // The peer drained the pipe before the payload was read.
    lost,
};

class Region {
public:
    Region(ProtectionDomain* domain, std::uint64_t iova, std::uint64_t length_bytes, unsigned access,
           std::unique_ptr<Memory> memory)
        : domain(domain), iova(iova), length_bytes(length_bytes), access(access), memory_(std::move(memory)) {}

    // Copy the chunk [address, address + size) into a bounce buffer (read) or out of a bounce buffer (write), if the
    // region is still registered.
    RegionError read(std::uint64_t address, BounceBuffer* bounce, std::size_t bounce_offset, std::size_t size_bytes);
    RegionError write(std::uint64_t address, const BounceBuffer& bounce, std::size_t bounce_offset,
                      std::size_t size_bytes);
    // Return whether the memory is mapped in this process. If it is not, splice_to_pipe() and read_from_pipe() must not
    // be called.
    [[nodiscard]] bool is_mapped();
    // Splice the chunk [address, address + size) into a pipe, or read it out of a pipe.
    RegionError splice_to_pipe(std::uint64_t address, Pipe* pipe, std::size_t size_bytes);
    RegionError read_from_pipe(std::uint64_t address, Pipe* pipe, std::size_t size_bytes);
    // Splice or read several chunks. The iov_base of a chunk is its address in the region. *succeeded_count is set to
    // the number of chunks before the first failure.
    RegionError splice_to_pipe(std::span<iovec> chunks, Pipe* pipe, std::size_t* succeeded_count);
    RegionError read_from_pipe(std::span<iovec> chunks, Pipe* pipe, std::size_t* succeeded_count);
    // Replace the 8 bytes at `address` by compute_new(old value), and store the old value in *original_value. The
    // update is atomic with respect to all atomic requests of this process.
    RegionError atomic_update(std::uint64_t address, std::uint64_t* original_value,
                              const std::function<std::uint64_t(std::uint64_t)>& compute_new);

    // Call do_access(address in this process) while the region stays registered. Return RegionError::fault if
    // do_access() returns false. The memory must be mapped.
    template <typename Access> RegionError access_mapped(std::uint64_t address, Access do_access) {
        std::shared_lock lock(mutex_);
        if (memory_ == nullptr) {
            return RegionError::refused;
        }
        return do_access(memory_->mapped_address(address - iova)) ? RegionError::none : RegionError::fault;
    }
    // Like access_mapped, for several chunks. The iov_base of a chunk is its address in the region.
    template <typename Access> RegionError access_mapped(std::span<iovec> chunks, Access do_access) {
        std::shared_lock lock(mutex_);
        if (memory_ == nullptr) {
            return RegionError::refused;
        }
        translate_to_mapped_addresses(chunks);
        return do_access(chunks) ? RegionError::none : RegionError::fault;
    }
    // Record that `issuer` grants the region. The region makes the issuer revoke the grant before the memory of the
    // region is released. Return the address of the region in this process; nullptr if the memory is not mapped or the
    // region was deregistered.
    std::byte* add_issuer(std::weak_ptr<GrantIssuer> issuer);

    // Wait for accesses in progress, make later accesses fail, and revoke the grants of the region. take_memory()
    // returns the memory of the region.
    void revoke() { take_memory(); }
    std::unique_ptr<Memory> take_memory();
    [[nodiscard]] bool is_revoked() const { return is_revoked_; }

    [[nodiscard]] bool covers(std::uint64_t address, std::uint64_t size_bytes) const {
        return address >= iova && size_bytes <= length_bytes && address - iova <= length_bytes - size_bytes;
    }
    [[nodiscard]] bool permits(unsigned required_access) const { return (access & required_access) == required_access; }

    ProtectionDomain* const domain;
    const std::uint64_t iova;
    const std::uint64_t length_bytes;
    const unsigned access;
    std::uint32_t lkey = 0;
    std::uint32_t rkey = 0;
    // Number of memory windows that are bound to the region. The lock of the key table protects it.
    int window_count = 0;
    // True after refuse_windows(), with which ibv_rereg_mr begins to replace the region. The same lock protects this
    // flag.
    bool refuses_windows = false;

private:
    void translate_to_mapped_addresses(std::span<iovec> chunks);

    std::shared_mutex mutex_;
    std::unique_ptr<Memory> memory_;
    std::atomic<bool> is_revoked_{false};
    std::mutex issuers_mutex_;
    std::vector<std::weak_ptr<GrantIssuer>> issuers_;
};

// Assign random keys to a region and add it to the table. All keys differ, and a key is reused only after all 2^32 keys
// were used.
void assign_keys(const std::shared_ptr<Region>& region);
// Give the keys of `old_region` to `region`, which takes its place.
void move_keys(const Region& old_region, const std::shared_ptr<Region>& region);
// Refuse all later bindings of memory windows to the region. Return false if a memory window is bound to the region.
[[nodiscard]] bool refuse_windows(Region* region);
// Remove the keys from the table. Return false if a memory window is bound to the region.
[[nodiscard]] bool remove_keys(const Region& region);

// Return the region with this key if it belongs to this domain, permits `required_access` and covers the range; else
// nullptr. An rkey may belong to a memory window (window.hpp): `qp_num` is the queue pair that got the request, and
// *address, the address in the request, is replaced by the address in the region.
std::shared_ptr<Region> find_by_lkey(std::uint32_t lkey, const ProtectionDomain* domain, unsigned required_access,
                                     std::uint64_t address, std::uint64_t size_bytes);
std::shared_ptr<Region> find_by_rkey(std::uint32_t rkey, const ProtectionDomain* domain, std::uint32_t qp_num,
                                     unsigned required_access, std::uint64_t* address, std::uint64_t size_bytes);

struct RegionHandle {
    ibv_mr public_mr{};
    std::shared_ptr<Region> impl;
    bool has_fixed_memory = false; // ibv_rereg_mr is not allowed: the memory is a dma-buf or on the device
};

// Create a region with new keys and its public structure.
ibv_mr* make_region_handle(ibv_pd* pd, void* address, std::uint64_t length, std::uint64_t iova, unsigned access,
                           std::unique_ptr<Memory> memory);

inline RegionHandle* get_mr_handle(ibv_mr* mr) {
    return reinterpret_cast<RegionHandle*>(mr);
}

} // namespace gdrkit::twin::verbs
