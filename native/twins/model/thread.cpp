// Implements the start of threads with blocked signals.

#include "model/thread.hpp"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace gdrkit::twin {

std::thread start_signal_blocking_thread(std::function<void()> function) {
    sigset_t blocked_signals, previous_mask;
    sigfillset(&blocked_signals);
    for (const int fault_signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) {
        sigdelset(&blocked_signals, fault_signal);
    }
    pthread_sigmask(SIG_SETMASK, &blocked_signals, &previous_mask);
    std::thread thread;
    try {
        thread = std::thread(std::move(function));
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
    return thread;
}

} // namespace gdrkit::twin
