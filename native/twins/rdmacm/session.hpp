// The start-up of the twin at its first call, its fault points, and the common first steps of every exported function.
#pragma once

#include <cerrno>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace gdrkit::twin::rdmacm {

// Read the environment variables and the fault plan at the first call. Return an error text, or an empty text if both
// are valid.
const std::string& start_session();

// Count a call of the exported function `function_name`. Return the errno that the fault plan injects, EINVAL if
// start_session() returned an error text, or 0.
int find_injected_error(std::string_view function_name);

// Run the body of an exported function, unless an error is injected. The body returns 0 or an errno. Return 0, or -1
// with errno set.
template <typename Body> int run_entry_with_errno(std::string_view function_name, Body&& body) {
    int error = find_injected_error(function_name);
    try {
        if (error == 0) {
            error = std::forward<Body>(body)();
        }
    } catch (const std::bad_alloc&) {
        error = ENOMEM;
    } catch (const std::system_error& failure) {
        error = failure.code().value();
    }
    if (error == 0) {
        return 0;
    }
    errno = error;
    return -1;
}

} // namespace gdrkit::twin::rdmacm
