// A queue of events with a file descriptor, like the kernel's event files. The descriptor is readable while an event is
// queued. Taking an event blocks unless the client has set O_NONBLOCK on the descriptor.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

#include "model/sockets.hpp"

namespace gdrkit::twin::verbs {

// Counts how many events of an object the client has taken, and how many it has acknowledged. Destroying the object
// waits until the counts are equal.
class EventCounter {
public:
    void count_taken() {
        std::lock_guard lock(mutex_);
        ++taken_count_;
    }
    void acknowledge(std::uint32_t count) {
        std::lock_guard lock(mutex_);
        acknowledged_count_ += count;
        counts_changed_.notify_all();
    }
    void wait_until_acknowledged() {
        std::unique_lock lock(mutex_);
        counts_changed_.wait(lock, [this] { return acknowledged_count_ >= taken_count_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable counts_changed_;
    std::uint64_t taken_count_ = 0;
    std::uint64_t acknowledged_count_ = 0;
};

template <typename Event> class EventQueue {
public:
    // Create the descriptor. Return 0 or an errno.
    int open() {
        fd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE));
        return fd_ ? 0 : errno;
    }

    // Close the descriptor. Later events are lost.
    void close() {
        std::lock_guard lock(mutex_);
        fd_.reset();
    }

    [[nodiscard]] int fd() const { return fd_.get(); }

    void push(const Event& event) {
        std::lock_guard lock(mutex_);
        events_.push_back(event);
        eventfd_write(fd_.get(), 1);
    }

    // Take the first event. Return 0 or an errno: EAGAIN (non-blocking descriptor only) or EINTR. `on_take` counts the
    // event as taken. take() calls it with the lock held, so that no drop_if runs between the removal and the count of
    // the event.
    template <typename OnTake> int take(Event* event, OnTake on_take) {
        for (;;) {
            {
                std::lock_guard lock(mutex_);
                if (!events_.empty()) {
                    *event = events_.front();
                    decrement_eventfd();
                    events_.pop_front();
                    on_take(*event);
                    return 0;
                }
            }
            const int flags = fcntl(fd_.get(), F_GETFL);
            if (flags < 0) {
                return errno;
            }
            if ((flags & O_NONBLOCK) != 0) {
                return EAGAIN;
            }
            pollfd poll_fd{fd_.get(), POLLIN, 0};
            if (poll(&poll_fd, 1, -1) < 0) {
                return errno;
            }
        }
    }

    // Remove the queued events for which `match` returns true, as the kernel does when an object is destroyed.
    template <typename Match> void drop_if(Match match) {
        std::lock_guard lock(mutex_);
        for (auto event = events_.begin(); event != events_.end();) {
            if (match(*event)) {
                event = events_.erase(event);
                decrement_eventfd();
            } else {
                ++event;
            }
        }
    }

private:
    // The count of the eventfd equals the number of events, so this read never blocks.
    void decrement_eventfd() {
        eventfd_t decrement = 0; // always 1 (EFD_SEMAPHORE)
        eventfd_read(fd_.get(), &decrement);
    }

    Fd fd_;
    std::mutex mutex_;
    std::deque<Event> events_;
};

} // namespace gdrkit::twin::verbs
