// Memory regions and the keys by which requests name them.
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
    // No such key, another protection domain, outside the range, or not permitted.
    refused,
    // The memory is gone from under the region.
    fault,
    // The peer took back what was to be written.
    lost,
};

class Region {
public:
    Region(ProtectionDomain* domain, std::uint64_t iova, std::uint64_t length_bytes, unsigned access,
           std::unique_ptr<Memory> memory)
        : domain(domain), iova(iova), length_bytes(length_bytes), access(access), memory_(std::move(memory)) {}

    // Moves bytes of the chunk [address, address + size), as long as the region is registered.
    RegionError read(std::uint64_t address, Bounce* bounce, std::size_t at, std::size_t size);
    RegionError write(std::uint64_t address, const Bounce& bounce, std::size_t at, std::size_t size);
    // The same by way of a pipe, for memory that is mapped here: not for what only a driver reaches.
    [[nodiscard]] bool mapped();
    RegionError lend(std::uint64_t address, Pipe* pipe, std::size_t size);
    RegionError take(std::uint64_t address, Pipe* pipe, std::size_t size);
    // Of several chunks, which `parts` names by their addresses; `whole` is how many of them went as they should.
    RegionError lend(std::span<iovec> parts, Pipe* pipe, std::size_t* whole);
    RegionError take(std::span<iovec> parts, Pipe* pipe, std::size_t* whole);
    // Replaces the 8 bytes at `address` by what `change` makes of them, atomically among all atomic requests of this
    // process.
    RegionError change(std::uint64_t address, std::uint64_t* original,
                       const std::function<std::uint64_t(std::uint64_t)>& changed);

    // Waits for the access in flight; later ones are refused.
    void revoke();
    [[nodiscard]] bool revoked() const { return revoked_; }

    [[nodiscard]] bool covers(std::uint64_t address, std::uint64_t size) const {
        return address >= iova && size <= length_bytes && address - iova <= length_bytes - size;
    }
    [[nodiscard]] bool permits(unsigned wanted) const { return (access & wanted) == wanted; }

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

// Draws both keys and enters the region. Keys are random, differ from one another, and no key comes back while the
// process lives.
void enter_keys(const std::shared_ptr<Region>& region);
void remove_keys(const Region& region);

// The region that a key names, if the domain is its own, it permits `wanted` and covers the range; else nullptr.
std::shared_ptr<Region> find_local(std::uint32_t lkey, const ProtectionDomain* domain, unsigned wanted,
                                   std::uint64_t address, std::uint64_t size);
std::shared_ptr<Region> find_remote(std::uint32_t rkey, const ProtectionDomain* domain, unsigned wanted,
                                    std::uint64_t address, std::uint64_t size);

struct RegionHandle {
    ibv_mr abi{};
    std::shared_ptr<Region> model;
};

inline RegionHandle* find_region(ibv_mr* mr) {
    return reinterpret_cast<RegionHandle*>(mr);
}

} // namespace gdrkit::twin::verbs
