// The table of the process's memory keys: assigns random lkeys and rkeys to regions and finds a region by its key.

#include <mutex>
#include <unordered_map>

#include "ibverbs/region.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {
namespace {

using Keys = std::unordered_map<std::uint32_t, std::shared_ptr<Region>>;

struct KeyTable {
    std::mutex mutex;
    std::uint32_t drawn = static_cast<std::uint32_t>(random_u64()); // Counts from anywhere.
    Keys local, remote;
};

KeyTable& key_table() {
    static auto* const all = new KeyTable;
    return *all;
}

// A permutation of all numbers of 32 bits (the last steps of MurmurHash3).
std::uint32_t scramble(std::uint32_t number) {
    number = (number ^ number >> 16) * 0x85ebca6b;
    number = (number ^ number >> 13) * 0xc2b2ae35;
    return number ^ number >> 16;
}

// No key comes twice before all have come, and none of them has to be remembered for that.
std::uint32_t draw_unused_key(KeyTable* all) {
    std::uint32_t key = 0;
    while (key == 0) {
        key = scramble(++all->drawn);
    }
    return key;
}

std::shared_ptr<Region> find_usable_region(const Keys KeyTable::*keys, std::uint32_t key,
                                           const ProtectionDomain* domain, unsigned required_access,
                                           std::uint64_t address, std::uint64_t size) {
    KeyTable& all = key_table();
    std::lock_guard lock(all.mutex);
    const auto found = (all.*keys).find(key);
    if (found == (all.*keys).end() || found->second->domain != domain || !found->second->permits(required_access) ||
        !found->second->covers(address, size)) {
        return nullptr;
    }
    return found->second;
}

} // namespace

void assign_keys(const std::shared_ptr<Region>& region) {
    KeyTable& all = key_table();
    std::lock_guard lock(all.mutex);
    region->lkey = draw_unused_key(&all);
    region->rkey = draw_unused_key(&all);
    all.local[region->lkey] = region;
    all.remote[region->rkey] = region;
}

void remove_keys(const Region& region) {
    KeyTable& all = key_table();
    std::lock_guard lock(all.mutex);
    all.local.erase(region.lkey);
    all.remote.erase(region.rkey);
}

std::shared_ptr<Region> find_by_lkey(std::uint32_t lkey, const ProtectionDomain* domain, unsigned required_access,
                                     std::uint64_t address, std::uint64_t size) {
    return find_usable_region(&KeyTable::local, lkey, domain, required_access, address, size);
}

std::shared_ptr<Region> find_by_rkey(std::uint32_t rkey, const ProtectionDomain* domain, unsigned required_access,
                                     std::uint64_t address, std::uint64_t size) {
    return find_usable_region(&KeyTable::remote, rkey, domain, required_access, address, size);
}

} // namespace gdrkit::twin::verbs
