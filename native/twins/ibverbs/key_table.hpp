// The table of the process's memory keys, for the files that implement regions and memory windows.
#pragma once

#include <mutex>
#include <unordered_map>

#include "ibverbs/region.hpp"
#include "ibverbs/window.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {

using RegionsByKey = std::unordered_map<std::uint32_t, std::shared_ptr<Region>>;

struct KeyTable {
    std::mutex mutex;
    // Each new key is a scrambled value of this counter, which starts at a random value.
    std::uint32_t counter = static_cast<std::uint32_t>(random_u64());
    RegionsByKey by_lkey, by_rkey;
    // The memory windows, by the upper 24 bits of their rkey. Binding a window may change only the lower 8 bits.
    std::unordered_map<std::uint32_t, std::shared_ptr<Window>> windows;
};

KeyTable& key_table();

// Return a key that no region has, and whose upper 24 bits no window has. The caller holds the lock of the table.
std::uint32_t draw_unused_key(KeyTable* table);

} // namespace gdrkit::twin::verbs
