// Three threads that turn posts of the submit semaphores into an event that poll() can wait for.
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <thread>

#include "usrbio/agent/types.hpp"
#include "usrbio/ring/named_semaphore.hpp"

namespace gdrkit::usrbio::agent {

class Watcher {
public:
    // `names`: "/NAME", as sem_open takes them, high priority first; the semaphores exist. Throws std::system_error.
    Watcher(const std::array<std::string, priority_classes>& names, int event_fd);
    ~Watcher();
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

private:
    void watch(NamedSemaphore& semaphore);
    void close() noexcept;

    int event_fd_;
    std::atomic<bool> stopping_{false};
    std::array<NamedSemaphore, priority_classes> semaphores_;
    std::array<std::thread, priority_classes> threads_;
};

} // namespace gdrkit::usrbio::agent
