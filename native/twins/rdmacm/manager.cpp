// Implements the thread of the connection manager, which watches descriptors and runs timers.

#include "rdmacm/manager.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <system_error>

#include "model/sockets.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

using Clock = std::chrono::steady_clock;

struct Watch {
    int fd;
    std::function<void()> on_readable;
};

struct Timer {
    Clock::time_point deadline;
    std::function<void()> on_expiry;
};

struct Manager {
    std::mutex mutex;
    Fd epoll_fd, wake_eventfd;
    Token last_token = 0;
    std::map<Token, Watch> watches;
    std::map<Token, Timer> timers;
    bool is_started = false;
};

constexpr Token wake_token = 0; // marks wake_eventfd in the events of epoll; no watch has this token

// The manager is never destroyed, because its thread runs until the process ends.
Manager& get_manager() {
    static auto* const instance = new Manager;
    return *instance;
}

void add_to_epoll(const Manager& manager, int fd, Token token) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = token;
    if (epoll_ctl(manager.epoll_fd.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        throw std::system_error(errno, std::generic_category());
    }
}

// Run the expired timers. Return the time until the next timer expires in milliseconds, rounded up, or -1 if there is
// no other timer.
int run_expired_timers(Manager* manager) {
    for (;;) {
        const auto next_timer =
            std::min_element(manager->timers.begin(), manager->timers.end(),
                             [](auto& left, auto& right) { return left.second.deadline < right.second.deadline; });
        if (next_timer == manager->timers.end()) {
            return -1;
        }
        const auto now = Clock::now();
        if (next_timer->second.deadline > now) {
            return static_cast<int>(
                       std::chrono::duration_cast<std::chrono::milliseconds>(next_timer->second.deadline - now)
                           .count()) +
                   1;
        }
        const auto on_expiry = std::move(next_timer->second.on_expiry);
        manager->timers.erase(next_timer);
        on_expiry();
    }
}

void run_manager() {
    Manager& manager = get_manager();
    std::array<epoll_event, 32> events{};
    for (;;) {
        int timeout_ms = -1;
        {
            std::lock_guard lock(manager.mutex);
            timeout_ms = run_expired_timers(&manager);
        }
        const int event_count =
            epoll_wait(manager.epoll_fd.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
        std::lock_guard lock(manager.mutex);
        for (int index = 0; index < event_count; ++index) {
            const Token token = events[static_cast<std::size_t>(index)].data.u64;
            if (token == wake_token) {
                eventfd_t wake_count = 0;
                eventfd_read(manager.wake_eventfd.get(), &wake_count);
                continue;
            }
            // The function of an earlier event may have removed this watch.
            const auto entry = manager.watches.find(token);
            if (entry != manager.watches.end()) {
                // Copy the function, because it may remove its own watch and with it the original.
                const auto on_readable = entry->second.on_readable;
                on_readable();
            }
        }
    }
}

void start_thread_if_needed(Manager* manager) {
    if (manager->is_started) {
        return;
    }
    manager->epoll_fd = Fd(epoll_create1(EPOLL_CLOEXEC));
    manager->wake_eventfd = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!manager->epoll_fd || !manager->wake_eventfd) {
        throw std::system_error(errno, std::generic_category());
    }
    add_to_epoll(*manager, manager->wake_eventfd.get(), wake_token);
    start_signal_blocking_thread(run_manager).detach();
    manager->is_started = true;
}

} // namespace

std::mutex& manager_mutex() {
    return get_manager().mutex;
}

Token watch(int fd, std::function<void()> on_readable) {
    Manager& manager = get_manager();
    start_thread_if_needed(&manager);
    const Token token = ++manager.last_token;
    add_to_epoll(manager, fd, token);
    manager.watches.emplace(token, Watch{fd, std::move(on_readable)});
    return token;
}

void unwatch(Token token) {
    Manager& manager = get_manager();
    const auto entry = manager.watches.find(token);
    if (entry != manager.watches.end()) {
        epoll_ctl(manager.epoll_fd.get(), EPOLL_CTL_DEL, entry->second.fd, nullptr);
        manager.watches.erase(entry);
    }
}

Token start_timer(std::chrono::milliseconds delay, std::function<void()> on_expiry) {
    Manager& manager = get_manager();
    start_thread_if_needed(&manager);
    const Token token = ++manager.last_token;
    manager.timers.emplace(token, Timer{Clock::now() + delay, std::move(on_expiry)});
    eventfd_write(manager.wake_eventfd.get(), 1); // the thread now recomputes its timeout
    return token;
}

void cancel_timer(Token token) {
    get_manager().timers.erase(token);
}

} // namespace gdrkit::twin::rdmacm
