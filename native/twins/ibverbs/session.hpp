// The start-up of the verbs twin at its first call, fault injection, and helpers that return an error by the convention
// of a verbs function.
#pragma once

#include <cerrno>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "model/fault.hpp"

namespace gdrkit::twin::verbs {

// Read the configuration and the fault plan at the first call. Return an error text, or an empty string if both are
// valid. A caller may ignore the text and only ensure that both were read.
const std::string& start_session();

// Count a call at a fault point: the name of a function, or wc.* for a completion. Return the errno (for wc.* the
// status) that the fault plan injects; nullopt if it injects none. `nics` are the names of the NICs to which the call
// belongs.
std::optional<int> find_injected_fault(std::string_view point, std::span<const std::string_view> nics = {});

// Like the function above, for a function that is called often: a static `site` avoids the search for the fault point.
std::optional<int> find_injected_fault(FaultSite* site, std::span<const std::string_view> nics = {});

// Set errno and return nullptr, as many verbs functions report an error.
inline std::nullptr_t fail_null(int error) {
    errno = error;
    return nullptr;
}

// Set errno and return -1, as some verbs functions report an error.
inline int fail_minus1(int error) {
    errno = error;
    return -1;
}

} // namespace gdrkit::twin::verbs
