#include "usrbio/client/library_mutex.hpp"

#include <pthread.h>

#include <array>
#include <cstddef>

namespace gdrkit::usrbio {

namespace {

struct Library {
    std::mutex mutex;
    std::array<void (*)(), 4> calls{};
    std::size_t count = 0;
};

Library& library() noexcept {
    static Library* instance = [] {
        auto* created = new Library;
        pthread_atfork([] { library_mutex().lock(); }, [] { library_mutex().unlock(); },
                       [] {
                           for (std::size_t i = 0; i < library().count; ++i) {
                               library().calls[i]();
                           }
                           library_mutex().unlock();
                       });
        return created;
    }();
    return *instance;
}

} // namespace

std::mutex& library_mutex() noexcept {
    return library().mutex;
}

void in_forked_child(void (*call)()) noexcept {
    const std::lock_guard lock(library_mutex());
    library().calls.at(library().count++) = call;
}

} // namespace gdrkit::usrbio
