// Functions for the pools of host memory and of device memory: they read the limits, and start the thread that frees
// idle memory.
#pragma once

#include <cstddef>

namespace gdrkit::usrbio {

// Returns the number in an environment variable, or the default if the variable is not set. If its text is not a
// number, logs a warning and returns the default.
std::size_t read_number_variable(const char* variable, std::size_t default_value) noexcept;

// Starts a thread that frees idle memory. The thread blocks all signals, so that only threads of the application handle
// them. `name` has at most 15 characters. Returns false if the thread cannot be started.
bool start_pool_thread(const char* name, void (*function)()) noexcept;

} // namespace gdrkit::usrbio
