// The table of the process's memory keys: assigns random lkeys and rkeys to regions and finds a region by its key.

#include <mutex>
#include <unordered_map>

#include "ibverbs/region.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {
namespace {

using RegionsByKey = std::unordered_map<std::uint32_t, std::shared_ptr<Region>>;

struct KeyTable {
    std::mutex mutex;
    std::uint32_t counter = static_cast<std::uint32_t>(random_u64()); // starts at a random value
    RegionsByKey local, remote;
};

KeyTable& key_table() {
    static auto* const instance = new KeyTable;
    return *instance;
}

// Map each 32-bit value to a different 32-bit value (the last steps of MurmurHash3).
std::uint32_t scramble(std::uint32_t value) {
    value = (value ^ value >> 16) * 0x85ebca6b;
    value = (value ^ value >> 13) * 0xc2b2ae35;
    return value ^ value >> 16;
}

// Return the next key, which is the scrambled counter. A key repeats only after all other keys were drawn, so used keys
// need not be stored.
std::uint32_t draw_unused_key(KeyTable* state) {
    std::uint32_t key = 0;
    while (key == 0) {
        key = scramble(++state->counter);
    }
    return key;
}

std::shared_ptr<Region> find_usable_region(const RegionsByKey KeyTable::*regions, std::uint32_t key,
                                           const ProtectionDomain* domain, unsigned required_access,
                                           std::uint64_t address, std::uint64_t size) {
    KeyTable& state = key_table();
    std::lock_guard lock(state.mutex);
    const auto found = (state.*regions).find(key);
    if (found == (state.*regions).end()) {
        return nullptr;
    }
    const std::shared_ptr<Region>& region = found->second;
    const bool is_usable =
        protects_the_same(region->domain, domain) && region->permits(required_access) && region->covers(address, size);
    return is_usable ? region : nullptr;
}

} // namespace

void assign_keys(const std::shared_ptr<Region>& region) {
    KeyTable& state = key_table();
    std::lock_guard lock(state.mutex);
    region->lkey = draw_unused_key(&state);
    region->rkey = draw_unused_key(&state);
    state.local[region->lkey] = region;
    state.remote[region->rkey] = region;
}

void remove_keys(const Region& region) {
    KeyTable& state = key_table();
    std::lock_guard lock(state.mutex);
    state.local.erase(region.lkey);
    state.remote.erase(region.rkey);
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
