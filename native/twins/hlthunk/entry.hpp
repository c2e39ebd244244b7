// Common first steps of every exported function: read the environment and the fault plan, and count the call. When a
// function fails, it sets errno and returns -errno. A function that returns an address or a handle returns 0 instead.
#pragma once

#include <cerrno>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace gdrkit::twin::gaudi {

// Read the environment and the fault plan in the first call. Return the text of their error; empty if both are valid.
const std::string& configuration_error();

// Count the call. Return 0, or the errno with which the fault plan or a malformed environment makes it fail.
int begin_call(std::string_view symbol);

// Run the body and return its errno. Convert exceptions to errnos, because no exception may reach a C caller.
template <typename Body> int catch_exceptions(Body&& body) {
    try {
        return std::forward<Body>(body)();
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    } catch (const std::system_error& error) {
        return error.code().value();
    }
}

// Run the body of a function that returns 0 or -errno. The body returns 0 or an errno.
template <typename Body> int run_entry(std::string_view symbol, Body&& body) {
    const int error = catch_exceptions([&] {
        const int call_error = begin_call(symbol);
        return call_error != 0 ? call_error : std::forward<Body>(body)();
    });
    if (error != 0) {
        errno = error; // the real library's ioctl sets errno too
    }
    return -error;
}

// Run the body of a function that returns a descriptor, an index or -errno. The body returns the same.
template <typename Body> int run_value_or_error_entry(std::string_view symbol, Body&& body) {
    int result = -1;
    const int error = run_entry(symbol, [&] {
        result = std::forward<Body>(body)();
        return result < 0 ? -result : 0;
    });
    return error != 0 ? error : result;
}

// Run the body of a function that returns an address or a handle, or 0 with errno set. The body stores the value
// through its argument and returns 0 or an errno.
template <typename Body> std::uint64_t run_u64_entry(std::string_view symbol, Body&& body) {
    std::uint64_t value = 0;
    const int error = run_entry(symbol, [&] { return std::forward<Body>(body)(&value); });
    return error != 0 ? 0 : value;
}

} // namespace gdrkit::twin::gaudi
