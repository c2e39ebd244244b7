// SemaphoreWatcher waits for posts of the submit semaphores, with one thread for each semaphore. The threads report
// posts by one eventfd, because the agent's loop waits in poll() for several descriptors at once.
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <thread>

#include "usrbio/agent/types.hpp"
#include "usrbio/ring/named_semaphore.hpp"

namespace gdrkit::usrbio::agent {

class SemaphoreWatcher {
public:
    // `names`: names "/NAME" of existing semaphores as for sem_open, high priority first. `event_fd`: the eventfd to
    // which the threads write; it stays open longer than this object. Throws std::system_error.
    SemaphoreWatcher(const std::array<std::string, priority_class_count>& names, int event_fd);
    ~SemaphoreWatcher();
    SemaphoreWatcher(const SemaphoreWatcher&) = delete;
    SemaphoreWatcher& operator=(const SemaphoreWatcher&) = delete;

private:
    void watch(NamedSemaphore& semaphore);
    void close() noexcept;

    int event_fd_;
    std::atomic<bool> is_stopping_{false};
    std::array<NamedSemaphore, priority_class_count> semaphores_;
    std::array<std::thread, priority_class_count> threads_;
};

} // namespace gdrkit::usrbio::agent
