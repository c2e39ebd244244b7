// The structures that clients hold pointers to. Each begins with the public structure and owns, behind it, the model of
// the object.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

namespace gdrkit::twin::verbs {

// A number for the `handle` field of a public structure, unique in the process.
std::uint32_t next_handle();

void enter(std::string_view kind, const void* object);

// Whether this object is alive. One that was released before aborts the process with the stacks of both releases.
[[nodiscard]] bool alive(std::string_view kind, const void* object);

// Takes the object out of the ledger and keeps its memory from being given out again, so that a later use of the
// pointer meets a structure without a model and not somebody else's object. False when another thread released it
// meanwhile.
template <typename Handle> bool retire(std::string_view kind, Handle* handle);

bool leave(std::string_view kind, const void* object);
void quarantine(std::shared_ptr<void> memory);

template <typename Handle> bool retire(std::string_view kind, Handle* handle) {
    if (!leave(kind, handle)) {
        return false;
    }
    quarantine(std::shared_ptr<Handle>(handle));
    return true;
}

} // namespace gdrkit::twin::verbs
