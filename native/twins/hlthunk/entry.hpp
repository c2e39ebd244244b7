// Common first steps of every exported function: read the environment and the fault plan, and count the call. Functions
// return 0 or -errno; those that return an address or a handle return 0 and set errno.
#pragma once

#include <cerrno>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace gdrkit::twin::gaudi {

// Return the error of the environment or the fault plan; empty if both are valid.
const std::string& load_error();

// Count the call. Return 0, or the errno with which the fault plan or a malformed environment makes it fail.
int check_call(std::string_view symbol);

// Convert exceptions to errnos: none may reach a C caller.
template <typename Body> int catch_exceptions(Body&& body) {
    try {
        return std::forward<Body>(body)();
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    } catch (const std::system_error& error) {
        return error.code().value();
    }
}

// Run the body of a function that returns 0 or -errno. The body returns an errno.
template <typename Body> int entry(std::string_view symbol, Body&& body) {
    const int error = catch_exceptions([&] {
        const int error_code = check_call(symbol);
        return error_code != 0 ? error_code : std::forward<Body>(body)();
    });
    if (error != 0) {
        errno = error; // the real library's ioctl sets errno too
    }
    return -error;
}

// Run the body of a function that returns a descriptor or -errno. So does the body.
template <typename Body> int descriptor_entry(std::string_view symbol, Body&& body) {
    int created = -1;
    const int error = entry(symbol, [&] {
        created = std::forward<Body>(body)();
        return created < 0 ? -created : 0;
    });
    return error != 0 ? error : created;
}

// Run the body of a function that returns a number, or 0 with errno set. The body returns an errno and sets the number.
template <typename Body> std::uint64_t number_entry(std::string_view symbol, Body&& body) {
    std::uint64_t number = 0;
    const int error = entry(symbol, [&] { return std::forward<Body>(body)(&number); });
    return error != 0 ? 0 : number;
}

} // namespace gdrkit::twin::gaudi
