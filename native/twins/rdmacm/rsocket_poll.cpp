// rpoll and rselect wait for events of rsockets and of other descriptors.

#include <sys/select.h>

#include <algorithm>
#include <chrono>

#include "rdmacm/rsocket.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

using Clock = std::chrono::steady_clock;

// The descriptors of one call of rpoll, with the rsocket of each descriptor (nullptr for other descriptors).
class PollSet {
public:
    explicit PollSet(std::span<pollfd> descriptors) : descriptors_(descriptors) {
        const int saved_errno = errno;
        for (const pollfd& descriptor : descriptors) {
            sockets_.push_back(descriptor.fd < 0 ? nullptr : find_socket(descriptor.fd));
        }
        errno = saved_errno;
    }

    // Store the current events of each descriptor in its `revents`. Return the number of descriptors with events, or -1
    // with errno set.
    int update_events() {
        std::vector<pollfd> other_descriptors = list_other_descriptors(descriptors_);
        if (!other_descriptors.empty() && poll(other_descriptors.data(), other_descriptors.size(), 0) < 0) {
            return -1;
        }
        int ready_count = 0;
        std::size_t other_index = 0;
        for (std::size_t index = 0; index < descriptors_.size(); ++index) {
            pollfd& descriptor = descriptors_[index];
            if (sockets_[index] == nullptr) {
                descriptor.revents = other_descriptors[other_index++].revents;
            } else {
                const int ready_events = sockets_[index]->get_ready_events();
                descriptor.revents = static_cast<short>(ready_events & (descriptor.events | POLLERR | POLLHUP));
            }
            ready_count += descriptor.revents != 0 ? 1 : 0;
        }
        return ready_count;
    }

    // Make wait() return at the next change of an rsocket.
    void arm() {
        for (const auto& socket : sockets_) {
            if (socket != nullptr) {
                socket->arm();
            }
        }
    }

    // Wait for a change or the timeout. Return 0 in both cases, or -1 with errno set.
    int wait(int timeout_ms) {
        std::vector<pollfd> all_descriptors = list_other_descriptors(descriptors_);
        for (const auto& socket : sockets_) {
            if (socket != nullptr) {
                for (const int descriptor : socket->list_wait_descriptors()) {
                    all_descriptors.push_back({descriptor, POLLIN, 0});
                }
            }
        }
        const int result = poll(all_descriptors.data(), all_descriptors.size(), timeout_ms);
        const int saved_errno = errno;
        for (const auto& socket : sockets_) {
            if (socket != nullptr) {
                socket->drain_notifications();
            }
        }
        errno = saved_errno;
        return result < 0 ? -1 : 0;
    }

private:
    [[nodiscard]] std::vector<pollfd> list_other_descriptors(std::span<pollfd> descriptors) const {
        std::vector<pollfd> other_descriptors;
        for (std::size_t index = 0; index < descriptors.size(); ++index) {
            if (sockets_[index] == nullptr) {
                other_descriptors.push_back(descriptors[index]);
            }
        }
        return other_descriptors;
    }

    std::span<pollfd> descriptors_;
    std::vector<std::shared_ptr<RdmaSocket>> sockets_; // sockets_[i] belongs to descriptors_[i]
};

// Wait until a descriptor has events. Return as poll(2) does: 0 means that the timeout has passed. A timeout of -1
// means no limit.
int poll_with_timeout(PollSet* set, int timeout_ms) {
    const auto deadline = Clock::now() + std::chrono::milliseconds(std::max(timeout_ms, 0));
    for (;;) {
        int ready_count = set->update_events();
        if (ready_count == 0 && timeout_ms != 0) {
            set->arm();
            // A change that happened before arm() causes no notification, so query the events once more.
            ready_count = set->update_events();
        }
        if (ready_count != 0) {
            return ready_count;
        }
        int wait_ms = wake_up_interval_ms;
        if (timeout_ms >= 0) {
            const auto remaining_ms =
                std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
            if (remaining_ms <= 0) {
                return 0;
            }
            wait_ms = static_cast<int>(std::min<long long>(wait_ms, remaining_ms));
        }
        if (set->wait(wait_ms) != 0) {
            return -1;
        }
    }
}

} // namespace

extern "C" {

int rpoll(pollfd* fds, nfds_t nfds, int timeout) {
    if (const int injected_error = find_injected_error("rpoll"); injected_error != 0) {
        errno = injected_error;
        return -1;
    }
    PollSet set({fds, nfds});
    return poll_with_timeout(&set, timeout);
}

int rselect(int nfds, fd_set* readfds, fd_set* writefds, fd_set* exceptfds, timeval* timeout) {
    std::vector<pollfd> descriptors;
    const auto is_set = [](int descriptor, const fd_set* set) { return set != nullptr && FD_ISSET(descriptor, set); };
    for (int descriptor = 0; descriptor < nfds; ++descriptor) {
        const int requested_events = (is_set(descriptor, readfds) ? POLLIN : 0) |
                                     (is_set(descriptor, writefds) ? POLLOUT : 0) |
                                     (is_set(descriptor, exceptfds) ? POLLPRI : 0);
        if (requested_events != 0) {
            descriptors.push_back({descriptor, static_cast<short>(requested_events), 0});
        }
    }
    const int timeout_ms =
        timeout == nullptr ? -1 : static_cast<int>(timeout->tv_sec * 1000 + (timeout->tv_usec + 999) / 1000);
    if (rpoll(descriptors.data(), descriptors.size(), timeout_ms) < 0) {
        return -1;
    }
    int ready_count = 0;
    const auto count_ready_or_clear = [&](const pollfd& descriptor, fd_set* set, short requested_event,
                                          int ready_events) {
        if ((descriptor.events & requested_event) == 0) {
            return;
        }
        if ((descriptor.revents & ready_events) != 0) {
            ++ready_count;
        } else {
            FD_CLR(descriptor.fd, set);
        }
    };
    for (const pollfd& descriptor : descriptors) {
        // As in librdmacm, and unlike select(), exceptfds reports every event except POLLIN and POLLOUT.
        count_ready_or_clear(descriptor, readfds, POLLIN, POLLIN | POLLHUP);
        count_ready_or_clear(descriptor, writefds, POLLOUT, POLLOUT);
        count_ready_or_clear(descriptor, exceptfds, POLLPRI, ~(POLLIN | POLLOUT));
    }
    return ready_count;
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
