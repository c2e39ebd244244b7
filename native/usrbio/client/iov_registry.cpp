#include "usrbio/client/iov_registry.hpp"

#include "usrbio/client/library_mutex.hpp"

#include <cstdint>
#include <unordered_map>
#include <utility>

namespace gdrkit::usrbio {

namespace {

struct Registry {
    std::unordered_map<std::uintptr_t, std::shared_ptr<IovBacking>> backings;
    std::uintptr_t last = 0;
};

// Never destroyed: other libraries' destructors may still use iovs at the end of the process.
Registry& registry() {
    static auto* the = new Registry;
    return *the;
}

} // namespace

hf3fs_iov_handle keep_iov(std::shared_ptr<IovBacking> backing) {
    Registry& all = registry();
    const std::lock_guard lock(library_mutex());
    all.backings.emplace(all.last + 1, std::move(backing));
    return reinterpret_cast<hf3fs_iov_handle>(++all.last);
}

std::shared_ptr<IovBacking> find_iov(hf3fs_iov_handle handle) noexcept {
    Registry& all = registry();
    const std::lock_guard lock(library_mutex());
    const auto found = all.backings.find(reinterpret_cast<std::uintptr_t>(handle));
    return found == all.backings.end() ? nullptr : found->second;
}

void forget_iov(hf3fs_iov_handle handle) noexcept {
    Registry& all = registry();
    std::shared_ptr<IovBacking> last; // Ends outside the lock.
    const std::lock_guard lock(library_mutex());
    const auto found = all.backings.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found != all.backings.end()) {
        last = std::move(found->second);
        all.backings.erase(found);
    }
}

} // namespace gdrkit::usrbio
