// Reads the limits of pools from the environment, and starts the threads of pools.
#include "usrbio/client/pools.hpp"

#include "usrbio/client/log.hpp"

#include <pthread.h>
#include <signal.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace gdrkit::usrbio {

std::size_t read_number_variable(const char* variable, std::size_t default_value) noexcept {
    const char* const text = std::getenv(variable);
    if (text == nullptr) {
        return default_value;
    }
    std::size_t value = 0;
    const char* const text_end = text + std::strlen(text);
    const auto [number_end, error] = std::from_chars(text, text_end, value);
    if (error == std::errc() && number_end == text_end && number_end != text) {
        return value;
    }
    log_line(LogLevel::warning, "%s must be a number without a unit, not \"%s\"; %zu is used", variable, text,
             default_value);
    return default_value;
}

bool start_pool_thread(const char* name, void (*function)()) noexcept {
    // The new thread inherits the signal mask of this thread.
    sigset_t all_signals, previous_mask;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &previous_mask);
    pthread_t thread{};
    const int status = pthread_create(
        &thread, nullptr,
        [](void* argument) -> void* {
            reinterpret_cast<void (*)()>(argument)();
            return nullptr;
        },
        reinterpret_cast<void*>(function));
    pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
    if (status == 0) {
        pthread_setname_np(thread, name);
        pthread_detach(thread);
    }
    return status == 0;
}

} // namespace gdrkit::usrbio
