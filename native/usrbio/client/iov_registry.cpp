// The table in which the functions of the library look up an iov by its handle.
#include "usrbio/client/iov_registry.hpp"

#include "usrbio/client/library_mutex.hpp"

#include <cstdint>
#include <unordered_map>
#include <utility>

namespace gdrkit::usrbio {

namespace {

struct Registry {
    std::unordered_map<std::uintptr_t, std::shared_ptr<IovBacking>> backings; // By handle.
    std::uintptr_t last_handle = 0;
};

// Returns the only Registry. It is never destroyed, because destructors of other libraries may still use iovs when the
// process exits.
Registry& registry() {
    static auto* instance = new Registry;
    return *instance;
}

} // namespace

hf3fs_iov_handle register_iov(std::shared_ptr<IovBacking> backing) {
    Registry& table = registry();
    const std::lock_guard lock(library_mutex());
    table.backings.emplace(table.last_handle + 1, std::move(backing));
    return reinterpret_cast<hf3fs_iov_handle>(++table.last_handle);
}

std::shared_ptr<IovBacking> find_iov(hf3fs_iov_handle handle) noexcept {
    Registry& table = registry();
    const std::lock_guard lock(library_mutex());
    const auto entry = table.backings.find(reinterpret_cast<std::uintptr_t>(handle));
    return entry == table.backings.end() ? nullptr : entry->second;
}

void unregister_iov(hf3fs_iov_handle handle) noexcept {
    Registry& table = registry();
    std::shared_ptr<IovBacking> removed_backing; // Declared before the lock, so that it is destroyed after the unlock.
    const std::lock_guard lock(library_mutex());
    const auto entry = table.backings.find(reinterpret_cast<std::uintptr_t>(handle));
    if (entry != table.backings.end()) {
        removed_backing = std::move(entry->second);
        table.backings.erase(entry);
    }
}

} // namespace gdrkit::usrbio
