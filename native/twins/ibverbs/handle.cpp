// Tracks the live verbs objects, and keeps the memory of released objects for a while (quarantine).

#include "ibverbs/handle.hpp"

#include <atomic>
#include <deque>
#include <mutex>

#include "model/ledger.hpp"

namespace gdrkit::twin::verbs {
namespace {

struct Quarantine {
    std::mutex mutex;
    std::deque<std::shared_ptr<void>> objects; // the oldest first
};

Quarantine& quarantine_state() {
    static auto* const instance = new Quarantine;
    return *instance;
}

std::uint64_t get_ledger_key(const void* object) {
    return reinterpret_cast<std::uint64_t>(object);
}

} // namespace

std::uint32_t make_next_handle() {
    static std::atomic<std::uint32_t> last_handle{0};
    return ++last_handle;
}

void track(std::string_view type_name, const void* object) {
    record_open_handle(type_name, get_ledger_key(object));
}

bool is_alive(std::string_view type_name, const void* object) {
    // If the handle is not live, record_closed_handle aborts (double release) or returns false (unknown handle).
    return object != nullptr &&
           (ledger_holds(type_name, get_ledger_key(object)) || record_closed_handle(type_name, get_ledger_key(object)));
}

bool untrack(std::string_view type_name, const void* object) {
    return record_closed_handle(type_name, get_ledger_key(object));
}

void quarantine(std::shared_ptr<void> object) {
    Quarantine& quarantined = quarantine_state();
    // This variable is declared before the lock, so that the object is freed after the lock is released.
    std::shared_ptr<void> oldest_object;
    std::lock_guard lock(quarantined.mutex);
    quarantined.objects.push_back(std::move(object));
    // The ledger remembers only this number of releases, so the memory of older objects need not be kept.
    if (quarantined.objects.size() > max_remembered_releases) {
        oldest_object = std::move(quarantined.objects.front());
        quarantined.objects.pop_front();
    }
}

} // namespace gdrkit::twin::verbs
