// Watches the submit semaphores with one thread each, and reports their posts by an event that poll() can wait for.
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
    // `names`: "/NAME" as for sem_open, high priority first; the semaphores must exist. Throws std::system_error.
    SemaphoreWatcher(const std::array<std::string, priority_classes>& names, int event_fd);
    ~SemaphoreWatcher();
    SemaphoreWatcher(const SemaphoreWatcher&) = delete;
    SemaphoreWatcher& operator=(const SemaphoreWatcher&) = delete;

private:
    void watch(NamedSemaphore& semaphore);
    void close() noexcept;

    int event_fd_;
    std::atomic<bool> stopping_{false};
    std::array<NamedSemaphore, priority_classes> semaphores_;
    std::array<std::thread, priority_classes> threads_;
};

} // namespace gdrkit::usrbio::agent
