#include "usrbio/agent/watcher.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace gdrkit::usrbio::agent {

Watcher::Watcher(const std::array<std::string, priority_classes>& names, int event_fd) : event_fd_(event_fd) {
    try {
        for (std::size_t index = 0; index < names.size(); ++index) {
            sem_t* semaphore = sem_open(names[index].c_str(), 0);
            if (semaphore == SEM_FAILED)
                throw std::system_error(errno, std::generic_category(), "sem_open " + names[index]);
            semaphores_[index] = semaphore;
        }
        for (std::size_t index = 0; index < names.size(); ++index)
            threads_[index] = std::thread(&Watcher::watch, this, semaphores_[index]);
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
        if (semaphores_[index] == nullptr)
            continue;
        if (threads_[index].joinable()) {
            sem_post(semaphores_[index]);
            threads_[index].join();
        }
        sem_close(semaphores_[index]);
    }
}

void Watcher::watch(sem_t* semaphore) {
    while (!stopping_) {
        if (sem_wait(semaphore) != 0)
            continue; // A signal.
        // One event says it for all: the loop looks at every ring when it wakes up.
        while (sem_trywait(semaphore) == 0) {
        }
        const std::uint64_t one = 1;
        // It fails only when the counter is full, and then the event is there already.
        [[maybe_unused]] const ssize_t written = ::write(event_fd_, &one, sizeof one);
    }
}

} // namespace gdrkit::usrbio::agent
