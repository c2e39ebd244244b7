// Implements the start of threads with blocked signals.

#include "model/thread.hpp"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace gdrkit::twin {

std::thread start_signal_blocking_thread(std::function<void()> function) {
    sigset_t others, before;
    sigfillset(&others);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) {
        sigdelset(&others, own);
    }
    pthread_sigmask(SIG_SETMASK, &others, &before);
    std::thread thread;
    try {
        thread = std::thread(std::move(function));
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
}

} // namespace gdrkit::twin
