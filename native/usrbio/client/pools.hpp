// The parts that the pools of host memory and of device memory share.
#pragma once

#include <cstddef>

namespace gdrkit::usrbio {

// Returns the number in an environment variable. For any other text, logs a warning and returns the default.
std::size_t read_number_variable(const char* variable, std::size_t default_value) noexcept;

// Starts a thread that frees idle memory. The thread blocks all signals, so that only threads of the application handle
// them. `name` has at most 15 characters. Returns false if the thread cannot be started.
bool start_pool_thread(const char* name, void (*function)()) noexcept;

} // namespace gdrkit::usrbio
