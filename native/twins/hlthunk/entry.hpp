// Common first steps of the hl-thunk functions that can fail: read the environment and the fault plan, and count the
// call. A function that fails sets errno and returns -errno, or 0 if its result is an address or a handle.
#pragma once

#include <cerrno>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace gdrkit::twin::gaudi {

// Read the environment and the fault plan in the first call. Return the error text, which is empty if both are valid.
const std::string& configuration_error();

// Count the call of a function. Return 0, or the errno with which the call must fail because of the fault plan or a
// malformed environment.
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

// Count the call of a function that returns 0 or -errno, and run its body. The body returns 0 or an errno.
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

// Do the same for a function that returns a descriptor, an index or -errno. Its body returns this result.
template <typename Body> int run_value_or_error_entry(std::string_view symbol, Body&& body) {
    int result = -1;
    const int error = run_entry(symbol, [&] {
        result = std::forward<Body>(body)();
        return result < 0 ? -result : 0;
    });
    return error != 0 ? error : result;
}

// Do the same for a function that returns an address or a handle, or 0 with errno set. Its body stores the address or
// handle through its argument and returns 0 or an errno.
template <typename Body> std::uint64_t run_u64_entry(std::string_view symbol, Body&& body) {
    std::uint64_t address_or_handle = 0;
    const int error = run_entry(symbol, [&] { return std::forward<Body>(body)(&address_or_handle); });
    return error != 0 ? 0 : address_or_handle;
}

} // namespace gdrkit::twin::gaudi
