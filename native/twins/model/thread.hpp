// Starts the threads of the twins so that they do not receive the signals of the program.
#pragma once

#include <functional>
#include <thread>

namespace gdrkit::twin {

// Start a thread that blocks every signal except signals that the thread itself causes (SIGSEGV, SIGABRT ...). So the
// threads of the program handle the program's signals. Throws std::system_error if no thread can be created.
std::thread start_signal_blocking_thread(std::function<void()> function);

} // namespace gdrkit::twin
