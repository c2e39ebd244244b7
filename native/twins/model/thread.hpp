// The threads of the twins.
#pragma once

#include <functional>
#include <thread>

namespace gdrkit::twin {

// A thread that leaves the program's signals to the program's own threads; those of its own faults it gets. Throws
// std::system_error when there is none to be had.
std::thread start_quiet_thread(std::function<void()> function);

} // namespace gdrkit::twin
