// Who holds what: every handle that a twin gives out is entered here with the stack of its creation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gdrkit::twin {

// How many releases are remembered, the latest ones. Each takes 740 bytes with its stacks and, of a verbs object, the
// quarantined structure; a program that runs for days on a twin must not grow by them.
inline constexpr std::size_t releases_remembered = 1024;

// `kind` must be a string literal ("ibv_mr", "cuda_memory").
void ledger_add(std::string_view kind, std::uint64_t handle);

// Removes a live handle. A handle that was released before aborts the process and prints the stacks of creation, first
// and second release on stderr. A handle that was never known returns false: the caller answers in the convention of
// its function.
[[nodiscard]] bool ledger_remove(std::string_view kind, std::uint64_t handle);

[[nodiscard]] bool ledger_holds(std::string_view kind, std::uint64_t handle);

// {"ibv_mr": 2, "cuda_memory": 1}: live handles by kind, kinds without any left out, as JSON.
std::string ledger_json();

// The stacks of all live handles, for people.
std::string ledger_text();

} // namespace gdrkit::twin
