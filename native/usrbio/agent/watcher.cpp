// The threads that wait for the submit semaphores and wake the agent's loop by an eventfd.
#include "usrbio/agent/watcher.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <system_error>

namespace gdrkit::usrbio::agent {
namespace {

// Longest wait for a post, in milliseconds. A client that overwrites the semaphore can delay the wake-up of the loop
// for other clients by up to this time.
constexpr int post_wait_ms_max = 1000;

} // namespace

SemaphoreWatcher::SemaphoreWatcher(const std::array<std::string, priority_class_count>& names, int event_fd)
    : event_fd_(event_fd) {
    try {
        for (std::size_t index = 0; index < names.size(); ++index) {
            const std::string path = "/dev/shm/sem." + names[index].substr(1);
            if (const int status = semaphores_[index].open(path.c_str()); status != 0)
                throw std::system_error(-status, std::generic_category(), "open(" + path + ") failed");
        }
        for (std::size_t index = 0; index < names.size(); ++index)
            threads_[index] = std::thread(&SemaphoreWatcher::watch, this, std::ref(semaphores_[index]));
    } catch (...) {
        close();
        throw;
    }
}

SemaphoreWatcher::~SemaphoreWatcher() {
    close();
}

void SemaphoreWatcher::close() noexcept {
    is_stopping_ = true;
    for (std::size_t index = 0; index < semaphores_.size(); ++index) {
        if (threads_[index].joinable()) {
            semaphores_[index].post();
            threads_[index].join();
        }
    }
}

void SemaphoreWatcher::watch(NamedSemaphore& semaphore) {
    semaphore.restore(); // A client may have truncated or overwritten the semaphore.
    while (!is_stopping_) {
        if (!semaphore.wait_and_reset(post_wait_ms_max))
            semaphore.restore();
        // One event is enough for all posts, because the loop checks every ring when it wakes up. Raise the event after
        // a timeout too: a client that overwrites the semaphore can erase the post of another client.
        const std::uint64_t increment = 1;
        // The write fails only if the counter is full, and then the event is already raised.
        [[maybe_unused]] const ssize_t written_bytes = ::write(event_fd_, &increment, sizeof increment);
    }
}

} // namespace gdrkit::usrbio::agent
