#include "usrbio/client/ring_handle.hpp"

#include "usrbio/client/library_mutex.hpp"

#include <set>

namespace gdrkit::usrbio {

namespace {

std::set<RingHandle*>& handles() {
    static auto* the = [] {
        auto* made = new std::set<RingHandle*>;
        in_forked_child([] {
            for (RingHandle* handle : handles()) {
                handle->inherited.store(true, std::memory_order_relaxed);
                handle->gone.store(true, std::memory_order_relaxed);
            }
        });
        return made;
    }();
    return *the;
}

} // namespace

RingHandle::RingHandle() {
    std::set<RingHandle*>& all = handles(); // Takes the mutex when it is made.
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
    if (watching == Watching::not_asked) {
        watching = agent != nullptr && agent->watch(ring->completed()) ? Watching::yes : Watching::no;
    }
    return watching == Watching::yes;
}

void RingHandle::stop_watching() noexcept {
    if (watching == Watching::yes) {
        agent->forget(ring->completed());
        watching = Watching::no;
    }
}

} // namespace gdrkit::usrbio
