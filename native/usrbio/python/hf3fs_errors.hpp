// Functions by which the module _hf3fs raises Python errors. gdrkit/usrbio/_library.py has the Python functions that
// create these errors, with the advice for the user. _library.py stores these Python functions in the attributes
// `make_call_error`, `make_missing_function_error` and `make_misuse_error` of _hf3fs.
#pragma once

#include <nanobind/nanobind.h>

namespace gdrkit::usrbio {

namespace nb = nanobind;

// Stores a reference to the module _hf3fs without incrementing its reference count. The module exists during every call
// of its functions, so the reference is valid then.
void store_module_reference(nb::handle module) noexcept;

// Raises the error of a failed call of the library function `function_name`. `error_number` is a positive errno. The
// error contains `arguments`.
[[noreturn]] void raise_call_error(const char* function_name, int error_number, nb::dict arguments = nb::dict());

// Raises the error of a call of the function `function_name`, which the library does not have.
[[noreturn]] void raise_missing_function_error(const char* function_name);

// Raises the error of a call that this module refused before it changed anything. `reason` is a value of
// gdrkit.errors.Reason.
[[noreturn]] void raise_misuse_error(const char* message, const char* reason);

// Returns `function`. If it is null, because the library does not have it, raises an error that contains `name`.
template <typename Function> Function require(Function function, const char* name) {
    if (function == nullptr) {
        raise_missing_function_error(name);
    }
    return function;
}

} // namespace gdrkit::usrbio

// The function `name` of the library. Raises a Python error if the library does not have this function.
#define GDRKIT_REQUIRE(name) ::gdrkit::usrbio::require(::gdrkit::usrbio::functions().name, #name)
