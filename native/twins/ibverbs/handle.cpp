// Implements the tracking of live verbs objects and the quarantine of released ones.

#include "ibverbs/handle.hpp"

#include <atomic>
#include <deque>
#include <mutex>

#include "model/ledger.hpp"

namespace gdrkit::twin::verbs {
namespace {

struct Quarantine {
    std::mutex mutex;
    std::deque<std::shared_ptr<void>> memory;
};

Quarantine& quarantined() {
    static auto* const all = new Quarantine;
    return *all;
}

std::uint64_t key(const void* object) {
    return reinterpret_cast<std::uint64_t>(object);
}

} // namespace

std::uint32_t next_handle() {
    static std::atomic<std::uint32_t> last{0};
    return ++last;
}

void track(std::string_view kind, const void* object) {
    ledger_add(kind, key(object));
}

bool is_alive(std::string_view kind, const void* object) {
    // ledger_remove of a handle that is not live either aborts (double release) or returns false (unknown handle).
    return object != nullptr && (ledger_holds(kind, key(object)) || ledger_remove(kind, key(object)));
}

bool untrack(std::string_view kind, const void* object) {
    return ledger_remove(kind, key(object));
}

void quarantine(std::shared_ptr<void> memory) {
    Quarantine& all = quarantined();
    // Declared before the lock, so that the memory that leaves quarantine is freed after the lock is released.
    std::shared_ptr<void> oldest;
    std::lock_guard lock(all.mutex);
    all.memory.push_back(std::move(memory));
    // An older object can no longer be distinguished from one that never existed.
    if (all.memory.size() > releases_remembered) {
        oldest = std::move(all.memory.front());
        all.memory.pop_front();
    }
}

} // namespace gdrkit::twin::verbs
