// Life of the structures that clients hold pointers to (ibv_pd, ibv_mr ...). Each structure begins with the public one
// and owns, behind it, the twin's model of the object. Live objects are in the ledger; released ones stay in
// quarantine, so that a use after release is detected.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

namespace gdrkit::twin::verbs {

// Return a number for the `handle` field of a public structure, unique in the process.
std::uint32_t next_handle();

// Add a new object to the ledger.
void track(std::string_view kind, const void* object);

// Return whether the object is alive. Abort the process with the stacks of both releases if it was released before.
[[nodiscard]] bool is_alive(std::string_view kind, const void* object);

// Remove the object from the ledger and quarantine its memory, so that a later use of the pointer finds a structure
// without a model, not another object. Return false if another thread has released the object meanwhile.
template <typename Handle> bool retire(std::string_view kind, Handle* handle);

bool untrack(std::string_view kind, const void* object);
void quarantine(std::shared_ptr<void> memory);

template <typename Handle> bool retire(std::string_view kind, Handle* handle) {
    if (!untrack(kind, handle)) {
        return false;
    }
    quarantine(std::shared_ptr<Handle>(handle));
    return true;
}

} // namespace gdrkit::twin::verbs
