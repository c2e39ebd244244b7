// The set of all ring handles of the process, and the functions by which the end of the agent wakes a thread that waits
// on a ring.
#include "usrbio/client/ring_handle.hpp"

#include "usrbio/client/library_mutex.hpp"

#include <set>

namespace gdrkit::usrbio {

namespace {

// Returns the set of all ring handles. Its first call registers a function that marks the handles in a forked child.
std::set<RingHandle*>& handles() {
    static auto* table = [] {
        auto* new_table = new std::set<RingHandle*>;
        add_fork_handler([] {
            for (RingHandle* handle : handles()) {
                handle->is_inherited.store(true, std::memory_order_relaxed);
                handle->is_unserved.store(true, std::memory_order_relaxed);
            }
        });
        return new_table;
    }();
    return *table;
}

} // namespace

RingHandle::RingHandle() {
    // This call is not under the lock, because the first call of handles() locks library_mutex() itself.
    std::set<RingHandle*>& all_handles = handles();
    const std::lock_guard lock(library_mutex());
    all_handles.insert(this);
}

RingHandle::~RingHandle() {
    stop_watching_agent();
    std::set<RingHandle*>& all_handles = handles();
    const std::lock_guard lock(library_mutex());
    all_handles.erase(this);
}

bool RingHandle::start_watching_agent() noexcept {
    if (watch_state == Watch::unknown) {
        watch_state = agent != nullptr && agent->watch(ring->completion_semaphore()) ? Watch::yes : Watch::no;
    }
    return watch_state == Watch::yes;
}

void RingHandle::stop_watching_agent() noexcept {
    if (watch_state == Watch::yes) {
        agent->unwatch(ring->completion_semaphore());
        watch_state = Watch::no;
    }
}

} // namespace gdrkit::usrbio
