#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "ibverbs/region.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {
namespace {

using Keys = std::unordered_map<std::uint32_t, std::shared_ptr<Region>>;

struct KeyTable {
    std::mutex mutex;
    std::unordered_set<std::uint32_t> ever_used;
    Keys local, remote;
};

KeyTable& table() {
    static auto* const all = new KeyTable;
    return *all;
}

std::uint32_t draw(KeyTable* all) {
    for (;;) {
        const auto key = static_cast<std::uint32_t>(random_u64());
        if (key != 0 && all->ever_used.insert(key).second) {
            return key;
        }
    }
}

std::shared_ptr<Region> find(const Keys KeyTable::*keys, std::uint32_t key, const ProtectionDomain* domain,
                             unsigned wanted, std::uint64_t address, std::uint64_t size) {
    KeyTable& all = table();
    std::lock_guard lock(all.mutex);
    const auto found = (all.*keys).find(key);
    if (found == (all.*keys).end() || found->second->domain != domain || !found->second->permits(wanted) ||
        !found->second->covers(address, size)) {
        return nullptr;
    }
    return found->second;
}

} // namespace

void enter_keys(const std::shared_ptr<Region>& region) {
    KeyTable& all = table();
    std::lock_guard lock(all.mutex);
    region->lkey = draw(&all);
    region->rkey = draw(&all);
    all.local[region->lkey] = region;
    all.remote[region->rkey] = region;
}

void remove_keys(const Region& region) {
    KeyTable& all = table();
    std::lock_guard lock(all.mutex);
    all.local.erase(region.lkey);
    all.remote.erase(region.rkey);
}

std::shared_ptr<Region> find_local(std::uint32_t lkey, const ProtectionDomain* domain, unsigned wanted,
                                   std::uint64_t address, std::uint64_t size) {
    return find(&KeyTable::local, lkey, domain, wanted, address, size);
}

std::shared_ptr<Region> find_remote(std::uint32_t rkey, const ProtectionDomain* domain, unsigned wanted,
                                    std::uint64_t address, std::uint64_t size) {
    return find(&KeyTable::remote, rkey, domain, wanted, address, size);
}

} // namespace gdrkit::twin::verbs
