// A submit semaphore: the named semaphore by which applications wake the agent after a submission.
//
// Every client of an agent can fill the semaphore with invalid values or truncate its file. Therefore only the kernel
// reads and writes the memory (FUTEX_WAIT, FUTEX_WAKE_OP). The kernel returns EFAULT where an access by the processor
// would raise SIGBUS. The layout equals a glibc semaphore shared between processes, because a client of 3FS calls
// sem_post, and a daemon of 3FS calls sem_wait.
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

    // Opens the semaphore at `path`, which is "/dev/shm/sem.NAME" for the sem_open name "/NAME". Returns 0 or -errno of
    // open, fstat or mmap; -EINVAL: `path` is not a regular file; -ELOOP: `path` is a symbolic link.
    int open(const char* path) noexcept;

    // Increments the value and wakes a waiter by one system call, even if the recorded number of waiters is 0.
    void post() noexcept;

    // Restores the size of the file, and the words that glibc's sem_post reads before it wakes a waiter. Clients may
    // have truncated the file or overwritten the words. So the agent, which is the only process that waits, must call
    // this before its first wait and then periodically.
    void restore() noexcept;

    // Waits until the value is not 0, at most `timeout_ms`. Then sets the value to 0, because one wake-up serves all
    // posts. Returns false if no post came. May also return true without a post.
    bool wait_and_reset(int timeout_ms) noexcept;

private:
    void close() noexcept;

    Semaphore* semaphore_ = nullptr;
    int fd_ = -1;
};

} // namespace gdrkit::usrbio
