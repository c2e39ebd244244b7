// Creation and release of the structures that clients hold pointers to (ibv_pd, ibv_mr ...). The first member of each
// structure is the public structure (`public_pd`, `public_mr` ...). The member `impl`, if there is one, is the twin's
// implementation of the object. The ledger (model/ledger.hpp) lists the live objects. The memory of released objects is
// kept for a while (quarantined), so that a use after the release is detected.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

namespace gdrkit::twin::verbs {

// Return a number for the `handle` field of a public structure, unique in the process.
std::uint32_t make_next_handle();

// Add a new object to the ledger.
void track(std::string_view type_name, const void* object);

// Return whether the object is alive. If it was released, abort the process and print the stacks of its creation, of
// the release and of this call. Return false for a pointer that was never an object of this type.
[[nodiscard]] bool is_alive(std::string_view type_name, const void* object);

// Remove the object from the ledger. Return false if another thread has released the object meanwhile.
bool untrack(std::string_view type_name, const void* object);

// Keep the memory of a released object for a while, so that no new object gets its address.
void quarantine(std::shared_ptr<void> object);

// Remove the object from the ledger and quarantine its memory. Return false as untrack does.
template <typename Handle> bool retire(std::string_view type_name, Handle* handle) {
    if (!untrack(type_name, handle)) {
        return false;
    }
    quarantine(std::shared_ptr<Handle>(handle));
    return true;
}

} // namespace gdrkit::twin::verbs
