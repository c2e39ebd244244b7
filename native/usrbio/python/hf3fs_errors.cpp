// Calls the Python functions that create the errors of this module, and raises the errors.
#include "hf3fs_errors.hpp"

namespace gdrkit::usrbio {

namespace {

nb::handle hf3fs_module;

[[noreturn]] void raise(const nb::object& error) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw nb::python_error();
}

} // namespace

void store_module_reference(nb::handle loaded_module) noexcept {
    hf3fs_module = loaded_module;
}

void raise_call_error(const char* function_name, int error_number, nb::dict arguments) {
    raise(hf3fs_module.attr("make_call_error")(function_name, error_number, arguments));
}

void raise_missing_function_error(const char* function_name) {
    raise(hf3fs_module.attr("make_missing_function_error")(function_name));
}

void raise_misuse_error(const char* message, const char* reason) {
    raise(hf3fs_module.attr("make_misuse_error")(message, reason));
}

} // namespace gdrkit::usrbio
