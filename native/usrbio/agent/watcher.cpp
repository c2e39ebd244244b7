#include "usrbio/agent/watcher.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <system_error>

namespace gdrkit::usrbio::agent {
namespace {

// So long at most a wake-up stays lost that a client swallowed by writing to the semaphore.
constexpr int longest_wait_ms = 1000;

} // namespace

Watcher::Watcher(const std::array<std::string, priority_classes>& names, int event_fd) : event_fd_(event_fd) {
    try {
        for (std::size_t index = 0; index < names.size(); ++index) {
            const std::string path = "/dev/shm/sem." + names[index].substr(1);
            if (const int status = semaphores_[index].open(path.c_str()); status != 0)
                throw std::system_error(-status, std::generic_category(), "open " + path);
        }
        for (std::size_t index = 0; index < names.size(); ++index)
            threads_[index] = std::thread(&Watcher::watch, this, std::ref(semaphores_[index]));
    } catch (...) {
        close();
        throw;
    }
}

Watcher::~Watcher() {
    close();
}

void Watcher::close() noexcept {
    stopping_ = true;
    for (std::size_t index = 0; index < semaphores_.size(); ++index) {
        if (threads_[index].joinable()) {
            semaphores_[index].post();
            threads_[index].join();
        }
    }
}

void Watcher::watch(NamedSemaphore& semaphore) {
    semaphore.restore();
    while (!stopping_) {
        if (!semaphore.take_all(longest_wait_ms))
            semaphore.restore();
        // One event says it for all posts: the loop looks at every ring when it wakes up. It does so after a wait in
        // vain too: a client that overwrites the semaphore can swallow another one's post.
        const std::uint64_t one = 1;
        // It fails only when the counter is full, and then the event is there already.
        [[maybe_unused]] const ssize_t written = ::write(event_fd_, &one, sizeof one);
    }
}

} // namespace gdrkit::usrbio::agent
