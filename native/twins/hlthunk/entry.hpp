// What every entry does first: read the environment and the fault plan, count the call. Results are those of the
// library: 0 or -errno; an address or handle, 0 with errno set.
#pragma once

#include <cerrno>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace gdrkit::twin::gaudi {

// Empty, or what was malformed in the environment or the fault plan.
const std::string& load_error();

// 0, or the errno with which the plan, or a malformed environment, wants this call to fail.
int begin_call(std::string_view symbol);

// Nothing may be thrown into a C caller.
template <typename Body> int guarded(Body&& body) {
    try {
        return std::forward<Body>(body)();
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    } catch (const std::system_error& error) {
        return error.code().value();
    }
}

// A call that gives 0 or -errno; its body gives an errno.
template <typename Body> int entry(std::string_view symbol, Body&& body) {
    const int error = guarded([&] {
        const int refused = begin_call(symbol);
        return refused != 0 ? refused : std::forward<Body>(body)();
    });
    if (error != 0) {
        errno = error; // as the ioctl of the library leaves it
    }
    return -error;
}

// A call that gives a descriptor or -errno; its body gives one of these.
template <typename Body> int descriptor_entry(std::string_view symbol, Body&& body) {
    int made = -1;
    const int error = entry(symbol, [&] {
        made = std::forward<Body>(body)();
        return made < 0 ? -made : 0;
    });
    return error != 0 ? error : made;
}

// A call that gives a number, or 0 and errno; its body gives an errno and sets the number.
template <typename Body> std::uint64_t number_entry(std::string_view symbol, Body&& body) {
    std::uint64_t number = 0;
    const int error = entry(symbol, [&] { return std::forward<Body>(body)(&number); });
    return error != 0 ? 0 : number;
}

} // namespace gdrkit::twin::gaudi
