#include "usrbio/client/ring_handle.hpp"

#include "usrbio/client/library_mutex.hpp"

#include <set>

namespace gdrkit::usrbio {

namespace {

std::set<RingHandle*>& handles() {
    static auto* table = [] {
        auto* created = new std::set<RingHandle*>;
        in_forked_child([] {
            for (RingHandle* handle : handles()) {
                handle->inherited.store(true, std::memory_order_relaxed);
                handle->closed.store(true, std::memory_order_relaxed);
            }
        });
        return created;
    }();
    return *table;
}

} // namespace

RingHandle::RingHandle() {
    std::set<RingHandle*>& all = handles(); // The first call locks the mutex.
    const std::lock_guard lock(library_mutex());
    all.insert(this);
}

RingHandle::~RingHandle() {
    stop_watching();
    std::set<RingHandle*>& all = handles();
    const std::lock_guard lock(library_mutex());
    all.erase(this);
}

bool RingHandle::is_watched() noexcept {
    if (watch_state == Watch::unknown) {
        watch_state = agent != nullptr && agent->watch(ring->completion_semaphore()) ? Watch::yes : Watch::no;
    }
    return watch_state == Watch::yes;
}

void RingHandle::stop_watching() noexcept {
    if (watch_state == Watch::yes) {
        agent->unwatch(ring->completion_semaphore());
        watch_state = Watch::no;
    }
}

} // namespace gdrkit::usrbio
