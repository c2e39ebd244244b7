// A submit semaphore: every client of an agent can write it, cut its file short, or fill it with nonsense.
//
// So nothing here reads or writes its memory but the kernel (FUTEX_WAIT, FUTEX_WAKE_OP), which answers EFAULT where the
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

    // path: "/dev/shm/sem.NAME", as sem_open("/NAME") finds it. 0, or -errno: of open, fstat or mmap; -EINVAL: it is
    // not a regular file; -ELOOP: a symbolic link.
    int open(const char* path) noexcept;

    // Raises the value by one and wakes a waiter, whatever the count of waiters says. Costs one system call.
    void post() noexcept;

    // For the one process that waits: writes anew what glibc's sem_post reads before it wakes somebody, and gives the
    // file its size back. Call it before the first wait and now and then, since a client may have overwritten it.
    void restore() noexcept;

    // Waits until the value is not 0, at most `timeout_ms`; then sets it to 0, since one wake-up stands for all posts.
    // false: nobody posted. May also return true where nobody did.
    bool take_all(int timeout_ms) noexcept;

private:
    void close() noexcept;

    Semaphore* words_ = nullptr;
    int file_ = -1;
};

} // namespace gdrkit::usrbio
