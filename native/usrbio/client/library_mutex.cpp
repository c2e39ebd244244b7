// The mutex of the library's tables, and the handlers that keep it usable after fork().
#include "usrbio/client/library_mutex.hpp"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace gdrkit::usrbio {

namespace {

struct Library {
    std::mutex mutex;
    std::array<void (*)(), 8> child_functions{};
    std::size_t child_function_count = 0;
    std::atomic<std::uint64_t> fork_count{0};
};

Library& library() noexcept {
    static Library* instance = [] {
        auto* new_library = new Library;
        pthread_atfork(
            [] {
                library_mutex().lock();
                ++library().fork_count;
            },
            [] { library_mutex().unlock(); },
            [] {
                for (std::size_t i = 0; i < library().child_function_count; ++i) {
                    library().child_functions[i]();
                }
                library_mutex().unlock();
            });
        return new_library;
    }();
    return *instance;
}

} // namespace

std::mutex& library_mutex() noexcept {
    return library().mutex;
}

void call_in_forked_child(void (*function)()) noexcept {
    const std::lock_guard lock(library_mutex());
    library().child_functions.at(library().child_function_count++) = function;
}

std::uint64_t fork_count() noexcept {
    return library().fork_count;
}

} // namespace gdrkit::usrbio
