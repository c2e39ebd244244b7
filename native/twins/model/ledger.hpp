// The ledger of live handles. A twin adds every handle that it returns to a client, with the call stack of its
// creation. So leaks can be listed, and a double release ends the process and prints the stacks of the creation and
// both releases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gdrkit::twin {

// The ledger remembers this number of releases, the latest ones, to detect a second release. A remembered release takes
// about 500 bytes, most of them for its stacks. For a verbs object, the released structure is kept too. The limit
// exists because a program may run for days, and its memory must not grow with each release.
inline constexpr std::size_t max_remembered_releases = 128;

// Add a new handle to the ledger. `kind` is its type and must be a string literal ("ibv_mr", "cuda_memory").
void record_open_handle(std::string_view kind, std::uint64_t handle);

// Remove a live handle and return true. If the handle was released before, print the stacks of its creation, first and
// second release on stderr and abort the process. Return false for a handle that never existed; the caller then fails
// by the convention of its API.
[[nodiscard]] bool record_closed_handle(std::string_view kind, std::uint64_t handle);

// Return whether the handle is live.
[[nodiscard]] bool ledger_holds(std::string_view kind, std::uint64_t handle);

// Return the number of live handles of each kind as JSON, for example {"ibv_mr": 2, "cuda_memory": 1}.
std::string ledger_json();

// Return all live handles and their creation stacks as readable text.
std::string ledger_text();

} // namespace gdrkit::twin
