// A submit semaphore. Every client of an agent can write it, truncate its file, or fill it with invalid values.
//
// Therefore only the kernel reads and writes its memory (FUTEX_WAIT, FUTEX_WAKE_OP), which returns EFAULT where the
// processor would raise SIGBUS. The words are those of a glibc semaphore that processes share: a client of 3FS posts it
// by sem_post, and a daemon of 3FS waits on it by sem_wait.
#pragma once

#include "usrbio/ring/semaphore.hpp"

namespace gdrkit::usrbio {

class NamedSemaphore {
public:
    NamedSemaphore() = default;
    NamedSemaphore(NamedSemaphore&& other) noexcept;
    NamedSemaphore& operator=(NamedSemaphore&& other) noexcept;
    NamedSemaphore(const NamedSemaphore&) = delete;
    NamedSemaphore& operator=(const NamedSemaphore&) = delete;
    ~NamedSemaphore();

    // Opens the semaphore at `path`, "/dev/shm/sem.NAME" for the name "/NAME" of sem_open. Returns 0 or -errno of open,
    // fstat or mmap; -EINVAL: it is not a regular file; -ELOOP: it is a symbolic link.
    int open(const char* path) noexcept;

    // Increments the value and wakes a waiter, even if the number of waiters is 0. Costs one system call.
    void post() noexcept;

    // Restores the words that glibc's sem_post reads before it wakes a waiter, and the size of the file. The one
    // process that waits must call it before its first wait and periodically, because a client may have overwritten
    // them.
    void restore() noexcept;

    // Waits until the value is not 0, at most `timeout_ms`. Then sets it to 0, because one wake-up answers all posts.
    // Returns false if no post came. It may also return true without a post.
    bool wait_and_reset(int timeout_ms) noexcept;

private:
    void close() noexcept;

    Semaphore* semaphore_ = nullptr;
    int fd_ = -1;
};

} // namespace gdrkit::usrbio
