// The session of this process with the library: its configuration and its fault plan, and the ways in which verbs fail.
#pragma once

#include <cerrno>
#include <optional>
#include <string>
#include <string_view>

#include "model/fault.hpp"

namespace gdrkit::twin::verbs {

// Reads configuration and fault plan at the first call. Empty when both are good.
const std::string& session_error();

// Counts a call of this function; the errno (of wc.*: the status) that the fault plan wants it to answer, if any.
std::optional<int> call(std::string_view point);

// The same for a point that is reached often.
std::optional<int> call(FaultSite* site);

inline std::nullptr_t fail_null(int error) {
    errno = error;
    return nullptr;
}

inline int fail_minus1(int error) {
    errno = error;
    return -1;
}

} // namespace gdrkit::twin::verbs
