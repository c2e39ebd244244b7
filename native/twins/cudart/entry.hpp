// Common first steps of every exported function: find the context of the calling thread, and record the error that the
// call returns.
#pragma once

#include <new>
#include <system_error>
#include <utility>

#include "cudart/driver.hpp"

namespace gdrkit::twin::cudart {

// Record the error of a call for cudaGetLastError of this thread, and return it. Success does not clear an earlier
// error.
Error record_error(Error error);

// Call cuInit, once in each process. A forked child of a process that used CUDA gets the error of the driver.
Error initialize_driver();

// Make sure that the calling thread has a current context. If the thread has none, make the primary context of its
// device current, after creating that context if necessary. A context that the program made current through the driver
// stays current.
Error ensure_context();

// Create the primary context of a device if it does not exist, and return its handle.
Error get_primary_context(Device device, Handle* context);

// Store the device of the current context, or the device that the calling thread has selected if it has no context.
Error find_current_device(Device* device);

// Return success if the device exists.
Error check_device(Device device);

// Run the body of an exported function, convert its exceptions to error codes, and record its error.
template <typename Body> Error run_entry_before_init(Body&& body) {
    try {
        return record_error(std::forward<Body>(body)());
    } catch (const std::bad_alloc&) {
        return record_error(memory_allocation);
    } catch (const std::system_error&) {
        return record_error(unknown_error);
    }
}

// Run the body of an exported function that requires the driver, but no context.
template <typename Body> Error run_entry(Body&& body) {
    return run_entry_before_init([&] {
        const Error error = initialize_driver();
        return error == success ? std::forward<Body>(body)() : error;
    });
}

// Run the body of an exported function that requires a context.
template <typename Body> Error run_entry_in_context(Body&& body) {
    return run_entry_before_init([&] {
        const Error error = ensure_context();
        return error == success ? std::forward<Body>(body)() : error;
    });
}

// Call a function of the driver in the context of the calling thread.
template <typename... Parameters, typename... Arguments>
Error call_in_context(int (*Driver::*function)(Parameters...), Arguments... arguments) {
    return run_entry_in_context([&] { return call(function, arguments...); });
}

// Print the line "subject text" on stderr, once in the process for each subject.
void print_once(const char* subject, const char* text);

} // namespace gdrkit::twin::cudart
