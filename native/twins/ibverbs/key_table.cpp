// The table of the process's memory keys: assigns random lkeys and rkeys to regions and finds a region by its key.

#include "ibverbs/key_table.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Return a scrambled value. Different values have different results. These are the last steps of MurmurHash3.
std::uint32_t scramble_bits(std::uint32_t value) {
    value = (value ^ value >> 16) * 0x85ebca6b;
    value = (value ^ value >> 13) * 0xc2b2ae35;
    return value ^ value >> 16;
}

// Return the region with this key if it belongs to the domain, permits the access and covers the range; else nullptr.
// `map_member` is the map of the table for this type of key: by_lkey or by_rkey.
std::shared_ptr<Region> find_usable_region(const RegionsByKey KeyTable::*map_member, std::uint32_t key,
                                           const ProtectionDomain* domain, unsigned required_access,
                                           std::uint64_t address, std::uint64_t size_bytes) {
    KeyTable& table = key_table();
    std::lock_guard lock(table.mutex);
    const auto entry = (table.*map_member).find(key);
    if (entry == (table.*map_member).end()) {
        return nullptr;
    }
    const std::shared_ptr<Region>& region = entry->second;
    const bool is_usable = is_same_protection_domain(region->domain, domain) && region->permits(required_access) &&
                           region->covers(address, size_bytes);
    return is_usable ? region : nullptr;
}

} // namespace

KeyTable& key_table() {
    static auto* const instance = new KeyTable;
    return *instance;
}

// The keys are scrambled values of a counter. A key repeats only after all 2^32 values were used, so the table need not
// store the keys of released regions.
std::uint32_t draw_unused_key(KeyTable* table) {
    std::uint32_t key = 0;
    while (key == 0 || table->windows.contains(get_window_index(key))) {
        key = scramble_bits(++table->counter);
    }
    return key;
}

void assign_keys(const std::shared_ptr<Region>& region) {
    KeyTable& table = key_table();
    std::lock_guard lock(table.mutex);
    region->lkey = draw_unused_key(&table);
    region->rkey = draw_unused_key(&table);
    table.by_lkey[region->lkey] = region;
    table.by_rkey[region->rkey] = region;
}

void move_keys(const Region& old_region, const std::shared_ptr<Region>& region) {
    KeyTable& table = key_table();
    std::lock_guard lock(table.mutex);
    region->lkey = old_region.lkey;
    region->rkey = old_region.rkey;
    table.by_lkey[region->lkey] = region;
    table.by_rkey[region->rkey] = region;
}

bool refuse_windows(Region* region) {
    std::lock_guard lock(key_table().mutex);
    if (region->window_count > 0) {
        return false;
    }
    region->refuses_windows = true;
    return true;
}

bool remove_keys(const Region& region) {
    KeyTable& table = key_table();
    std::lock_guard lock(table.mutex);
    if (region.window_count > 0) {
        return false;
    }
    table.by_lkey.erase(region.lkey);
    table.by_rkey.erase(region.rkey);
    return true;
}

std::shared_ptr<Region> find_by_lkey(std::uint32_t lkey, const ProtectionDomain* domain, unsigned required_access,
                                     std::uint64_t address, std::uint64_t size_bytes) {
    return find_usable_region(&KeyTable::by_lkey, lkey, domain, required_access, address, size_bytes);
}

std::shared_ptr<Region> find_by_rkey(std::uint32_t rkey, const ProtectionDomain* domain, std::uint32_t qp_num,
                                     unsigned required_access, std::uint64_t* address, std::uint64_t size_bytes) {
    if (auto region = find_usable_region(&KeyTable::by_rkey, rkey, domain, required_access, *address, size_bytes)) {
        return region;
    }
    return find_window_region(rkey, domain, qp_num, required_access, address, size_bytes);
}

} // namespace gdrkit::twin::verbs
