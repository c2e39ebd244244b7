// A block without the global interpreter lock of Python (GIL).
#pragma once

#include <Python.h>
#include <unistd.h>

namespace gdrkit {

// Releases the GIL until the end of the block.
//
// A thread that takes the GIL while the interpreter ends must end: Python before 3.14 calls pthread_exit(3). That
// unwinds the stack, and C++ aborts the process at the first function that is noexcept, such as a destructor. Here the
// thread sleeps until the process has ended, as with Python 3.14.
class GilRelease {
public:
    GilRelease() : state_(PyEval_SaveThread()) {}
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;
    ~GilRelease() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) { // The C library reports pthread_exit() as an exception without a type.
            for (;;) {
                pause();
            }
        }
    }

private:
    PyThreadState* const state_;
};

} // namespace gdrkit
