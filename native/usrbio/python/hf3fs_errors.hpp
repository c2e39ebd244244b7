// Raises Python errors. gdrkit/usrbio/_library.py knows the error classes and the advice for each error, and sets a
// function of this module for each type of error.
#pragma once

#include <nanobind/nanobind.h>

namespace gdrkit::usrbio {

namespace nb = nanobind;

// Stores a borrowed reference to the module, which outlives every call into it.
void set_module(nb::handle module) noexcept;

// Raises the error of a failed call; `number` is its positive errno.
[[noreturn]] void raise_failed(const char* operation, int number, nb::dict arguments = nb::dict());

// Raises the error of a function that the library does not have.
[[noreturn]] void raise_missing(const char* operation);

// Raises the error of a refused call, which has changed nothing; `reason` is the value of a gdrkit.errors.Reason.
[[noreturn]] void raise_refused(const char* message, const char* reason);

// Returns the function, or raises an error if the library does not have it.
template <typename Function> Function require(Function function, const char* name) {
    if (function == nullptr) {
        raise_missing(name);
    }
    return function;
}

} // namespace gdrkit::usrbio

// The function of that name, or the Python error that the library does not have it.
#define GDRKIT_REQUIRE(name) ::gdrkit::usrbio::require(::gdrkit::usrbio::functions().name, #name)
