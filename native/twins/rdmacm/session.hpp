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

// Return the error text of the environment variables or of the fault plan; empty if both are valid. They are read once.
const std::string& session_error();

// Count the call and return the errno that the fault plan injects, or that a malformed configuration causes; else 0.
int find_injected_error(std::string_view function);

// Run the body of an exported function. The body returns 0 or an errno. Return 0, or -1 with errno set.
template <typename Body> int run_entry(std::string_view function, Body&& body) {
    int error = find_injected_error(function);
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
