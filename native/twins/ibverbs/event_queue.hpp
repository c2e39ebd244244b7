// A queue of events behind a file descriptor, like the kernel's event files: the descriptor is readable while an event
// is queued, and taking an event blocks unless the client has set O_NONBLOCK.
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

// Counts the events of an object that the client took and acknowledged. Destroying the object waits until the counts
// are equal.
class EventCounter {
public:
    void count_taken() {
        std::lock_guard lock(mutex_);
        ++taken_;
    }
    void acknowledge(std::uint32_t count) {
        std::lock_guard lock(mutex_);
        acknowledged_ += count;
        changed_.notify_all();
    }
    void wait_until_acknowledged() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return acknowledged_ >= taken_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::uint64_t taken_ = 0;
    std::uint64_t acknowledged_ = 0;
};

template <typename Event> class EventQueue {
public:
    // Create the descriptor. Return 0 or an errno.
    int open() {
        fd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE));
        return fd_ ? 0 : errno;
    }

    void close() { fd_.reset(); }

    [[nodiscard]] int fd() const { return fd_.get(); }

    void push(const Event& event) {
        std::lock_guard lock(mutex_);
        events_.push_back(event);
        eventfd_write(fd_.get(), 1);
    }

    // Take the first event. Return 0 or an errno: EAGAIN (non-blocking descriptor only) or EINTR. `taken` is called
    // while the lock is held, before drop_if can remove events of the object.
    template <typename Taken> int take(Event* event, Taken taken) {
        for (;;) {
            {
                std::lock_guard lock(mutex_);
                if (!events_.empty()) {
                    *event = events_.front();
                    remove_front_token();
                    events_.pop_front();
                    taken(*event);
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
            pollfd waiting{fd_.get(), POLLIN, 0};
            if (poll(&waiting, 1, -1) < 0) {
                return errno;
            }
        }
    }

    // Remove the events that match and that no client has taken, as the kernel does when an object is destroyed.
    template <typename Match> void drop_if(Match match) {
        std::lock_guard lock(mutex_);
        for (auto event = events_.begin(); event != events_.end();) {
            if (match(*event)) {
                event = events_.erase(event);
                remove_front_token();
            } else {
                ++event;
            }
        }
    }

private:
    // The eventfd's count equals the number of events, so this read never blocks.
    void remove_front_token() {
        eventfd_t one = 0;
        eventfd_read(fd_.get(), &one);
    }

    Fd fd_;
    std::mutex mutex_;
    std::deque<Event> events_;
};

} // namespace gdrkit::twin::verbs
