// The ledger of live handles. A twin enters every handle that it returns together with the stack of its creation, so
// that leaks can be listed and a double release ends the process with the stacks that explain it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gdrkit::twin {

// How many releases are remembered, the latest ones. Each takes 740 bytes with its stacks and, of a verbs object, the
// quarantined structure; a program that runs for days on a twin must not grow by them.
inline constexpr std::size_t releases_remembered = 128;

// `kind` must be a string literal ("ibv_mr", "cuda_memory").
void ledger_add(std::string_view kind, std::uint64_t handle);

// Remove a live handle and return true. If the handle was released before, print the stacks of its creation, first and
// second release on stderr and abort the process. Return false for a handle that never existed; the caller then fails
// by the convention of its API.
[[nodiscard]] bool ledger_remove(std::string_view kind, std::uint64_t handle);

[[nodiscard]] bool ledger_holds(std::string_view kind, std::uint64_t handle);

// Return the number of live handles of each kind as JSON, for example {"ibv_mr": 2, "cuda_memory": 1}.
std::string ledger_json();

// Return the creation stacks of all live handles as text for people.
std::string ledger_text();

} // namespace gdrkit::twin
