// Errors become Python's: gdrkit/usrbio/_library.py knows their classes and what to do about them, and gives the module
// a function for each kind.
#pragma once

#include <nanobind/nanobind.h>

namespace gdrkit::usrbio {

namespace nb = nanobind;

// The module, borrowed: whoever can call into it keeps it.
void remember_module(nb::handle module) noexcept;

// The library answered with an error: `number` is its positive errno.
[[noreturn]] void raise_failed(const char* operation, int number, nb::dict arguments = nb::dict());

// The library has no such function.
[[noreturn]] void raise_missing(const char* operation);

// The caller did what cannot be right, and nothing was done; `reason` is the value of a gdrkit.errors.Reason.
[[noreturn]] void raise_refused(const char* message, const char* reason);

// The function if the library has it.
template <typename Function> Function require(Function function, const char* name) {
    if (function == nullptr) {
        raise_missing(name);
    }
    return function;
}

} // namespace gdrkit::usrbio

// The function of this name, or the Python error that says that the library lacks it.
#define GDRKIT_REQUIRE(name) ::gdrkit::usrbio::require(::gdrkit::usrbio::functions().name, #name)
