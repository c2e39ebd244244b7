// Helpers for native modules of Python: a block that releases the global interpreter lock (GIL), and calls of Python
// functions that do not abort the process if the interpreter ends meanwhile.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace gdrkit {

// Calls a function that may take the GIL.
//
// If a thread takes the GIL while the interpreter ends, Python before 3.14 ends the thread with pthread_exit(3). This
// unwinds the stack, and C++ aborts the process at the first function that is noexcept, such as a destructor, or that
// catches all exceptions. Therefore this function makes the thread sleep until the process ends, as Python 3.14 does.
template <typename Function> auto sleep_if_interpreter_ends(const Function& function) {
    try {
        return function();
    } catch (const abi::__forced_unwind&) { // The C library throws this exception for pthread_exit().
        for (;;) {
            pause();
        }
    }
}

// Calls a function of Python without arguments. Returns a new reference to its result, or null if the function raised
// an exception.
inline PyObject* call_python(PyObject* function) {
    return sleep_if_interpreter_ends([&] { return PyObject_CallNoArgs(function); });
}

// Releases the GIL until the end of the block. nanobind::gil_scoped_release is not used, because it ends the process
// with std::terminate() if the interpreter ends meanwhile.
class GilRelease {
public:
    GilRelease() : thread_state_(PyEval_SaveThread()) { is_released = true; }
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;
    ~GilRelease() {
        sleep_if_interpreter_ends([&] { PyEval_RestoreThread(thread_state_); });
        is_released = false;
    }

    // Returns whether this thread has the GIL. A thread that Python does not know never has the GIL, and a thread with
    // an object of this class has released it.
    static bool has_gil() noexcept {
        return Py_IsInitialized() != 0 && PyGILState_GetThisThreadState() != nullptr && !is_released;
    }

private:
    static inline thread_local bool is_released = false;
    PyThreadState* const thread_state_;
};

} // namespace gdrkit
