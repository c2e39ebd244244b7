// The mutex of the library's tables, and the handlers that keep it usable after fork().
#include "usrbio/client/library_mutex.hpp"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace gdrkit::usrbio {

namespace {

// The mutex, and the functions that a forked child calls.
struct ForkState {
    std::mutex mutex;
    std::array<void (*)(), 8> child_functions{};
    std::size_t child_function_count = 0;
    std::atomic<std::uint64_t> fork_count{0};
};

ForkState& fork_state() noexcept {
    static ForkState* instance = [] {
        auto* new_state = new ForkState;
        // The three functions run, in this order: before fork(), in the parent after it, and in the child after it.
        pthread_atfork(
            [] {
                library_mutex().lock();
                ++fork_state().fork_count;
            },
            [] { library_mutex().unlock(); },
            [] {
                for (std::size_t i = 0; i < fork_state().child_function_count; ++i) {
                    fork_state().child_functions[i]();
                }
                library_mutex().unlock();
            });
        return new_state;
    }();
    return *instance;
}

} // namespace

std::mutex& library_mutex() noexcept {
    return fork_state().mutex;
}

void add_fork_handler(void (*function)()) noexcept {
    const std::lock_guard lock(library_mutex());
    fork_state().child_functions.at(fork_state().child_function_count++) = function;
}

std::uint64_t fork_count() noexcept {
    return fork_state().fork_count;
}

} // namespace gdrkit::usrbio
