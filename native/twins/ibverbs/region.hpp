// Memory regions (MR) and the keys with which requests name them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <span>

#include "ibverbs/memory.hpp"
#include "ibverbs/pipe.hpp"
#include "ibverbs/protection_domain.hpp"

namespace gdrkit::twin::verbs {

enum class RegionError {
    none,
    // The key is unknown or of another protection domain, the range is out of bounds, or the access is not permitted.
    refused,
    // The memory behind the region is no longer mapped.
    fault,
    // The peer drained the pipe before the payload was read.
    lost,
};

class Region {
public:
    Region(ProtectionDomain* domain, std::uint64_t iova, std::uint64_t length_bytes, unsigned access,
           std::unique_ptr<Memory> memory)
        : domain(domain), iova(iova), length_bytes(length_bytes), access(access), memory_(std::move(memory)) {}

    // Copy the chunk [address, address + size) to or from a bounce buffer, if the region is still registered.
    RegionError read(std::uint64_t address, BounceBuffer* bounce, std::size_t at, std::size_t size);
    RegionError write(std::uint64_t address, const BounceBuffer& bounce, std::size_t at, std::size_t size);
    // The same through a pipe, only for memory that is mapped in this process.
    [[nodiscard]] bool mapped();
    RegionError splice_to(std::uint64_t address, Pipe* pipe, std::size_t size);
    RegionError read_from(std::uint64_t address, Pipe* pipe, std::size_t size);
    // The same for several chunks, given by region addresses in `parts`. *whole is the number of chunks that succeeded.
    RegionError splice_to(std::span<iovec> parts, Pipe* pipe, std::size_t* succeeded);
    RegionError read_from(std::span<iovec> parts, Pipe* pipe, std::size_t* succeeded);
    // Replace the 8 bytes at `address` by changed(old value), atomically with respect to all atomic requests of this
    // process, and store the old value in *original.
    RegionError atomic_update(std::uint64_t address, std::uint64_t* original,
                              const std::function<std::uint64_t(std::uint64_t)>& changed);

    // Wait for accesses in progress and refuse later ones.
    void revoke();
    [[nodiscard]] bool revoked() const { return revoked_; }

    [[nodiscard]] bool covers(std::uint64_t address, std::uint64_t size) const {
        return address >= iova && size <= length_bytes && address - iova <= length_bytes - size;
    }
    [[nodiscard]] bool permits(unsigned required_access) const { return (access & required_access) == required_access; }

    ProtectionDomain* const domain;
    const std::uint64_t iova;
    const std::uint64_t length_bytes;
    const unsigned access;
    std::uint32_t lkey = 0;
    std::uint32_t rkey = 0;

private:
    void find_mapped(std::span<iovec> parts);

    std::shared_mutex mutex_;
    std::unique_ptr<Memory> memory_;
    std::atomic<bool> revoked_{false};
};

// Assign random keys to a region and add it to the table. All keys differ, and no key is reused while the process
// lives.
void assign_keys(const std::shared_ptr<Region>& region);
void remove_keys(const Region& region);

// Return the region of a key if it is of this domain, permits `wanted` and covers the range; else nullptr.
std::shared_ptr<Region> find_by_lkey(std::uint32_t lkey, const ProtectionDomain* domain, unsigned required_access,
                                     std::uint64_t address, std::uint64_t size);
std::shared_ptr<Region> find_by_rkey(std::uint32_t rkey, const ProtectionDomain* domain, unsigned required_access,
                                     std::uint64_t address, std::uint64_t size);

struct RegionHandle {
    ibv_mr abi{};
    std::shared_ptr<Region> model;
};

inline RegionHandle* mr_handle_of(ibv_mr* mr) {
    return reinterpret_cast<RegionHandle*>(mr);
}

} // namespace gdrkit::twin::verbs
