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

void enter(std::string_view kind, const void* object) {
    ledger_add(kind, key(object));
}

bool alive(std::string_view kind, const void* object) {
    // ledger_remove of what is not live either aborts (released before) or says that it never was.
    return object != nullptr && (ledger_holds(kind, key(object)) || ledger_remove(kind, key(object)));
}

bool leave(std::string_view kind, const void* object) {
    return ledger_remove(kind, key(object));
}

void quarantine(std::shared_ptr<void> memory) {
    Quarantine& all = quarantined();
    // Declared before the lock: what leaves quarantine is deleted after it is released.
    std::shared_ptr<void> oldest;
    std::lock_guard lock(all.mutex);
    all.memory.push_back(std::move(memory));
    // Older ones could no longer be told from objects that never were.
    if (all.memory.size() > releases_remembered) {
        oldest = std::move(all.memory.front());
        all.memory.pop_front();
    }
}

} // namespace gdrkit::twin::verbs
