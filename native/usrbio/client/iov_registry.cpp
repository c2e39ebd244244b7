#include "usrbio/client/iov_registry.hpp"

#include "usrbio/client/library_mutex.hpp"

#include <cstdint>
#include <unordered_map>
#include <utility>

namespace gdrkit::usrbio {

namespace {

struct Registry {
    std::unordered_map<std::uintptr_t, std::shared_ptr<IovBacking>> backings;
    std::uintptr_t last_number = 0;
};

// It is never destroyed: destructors of other libraries may still use iovs at the end of the process.
Registry& registry() {
    static auto* table = new Registry;
    return *table;
}

} // namespace

hf3fs_iov_handle register_iov(std::shared_ptr<IovBacking> backing) {
    Registry& all = registry();
    const std::lock_guard lock(library_mutex());
    all.backings.emplace(all.last_number + 1, std::move(backing));
    return reinterpret_cast<hf3fs_iov_handle>(++all.last_number);
}

std::shared_ptr<IovBacking> find_iov(hf3fs_iov_handle handle) noexcept {
    Registry& all = registry();
    const std::lock_guard lock(library_mutex());
    const auto entry = all.backings.find(reinterpret_cast<std::uintptr_t>(handle));
    return entry == all.backings.end() ? nullptr : entry->second;
}

void unregister_iov(hf3fs_iov_handle handle) noexcept {
    Registry& all = registry();
    std::shared_ptr<IovBacking> removed; // Its destructor runs after the lock was released.
    const std::lock_guard lock(library_mutex());
    const auto entry = all.backings.find(reinterpret_cast<std::uintptr_t>(handle));
    if (entry != all.backings.end()) {
        removed = std::move(entry->second);
        all.backings.erase(entry);
    }
}

} // namespace gdrkit::usrbio
