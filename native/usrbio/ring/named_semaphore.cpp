// A submit semaphore, whose memory only the kernel reads and writes (FUTEX_WAIT, FUTEX_WAKE_OP).
#include "usrbio/ring/named_semaphore.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

namespace gdrkit::usrbio {

namespace {

// Makes the kernel change `word` by `futex_operation` (FUTEX_OP_SET or FUTEX_OP_ADD) with `operand`, and wakes at most
// one thread that waits on `wake_word`. Returns false if no memory is mapped at `word`.
bool futex_update(std::uint32_t* word, int futex_operation, unsigned operand, std::uint32_t* wake_word) noexcept {
    // FUTEX_WAKE_OP also wakes waiters of `word` if the encoded comparison is true. Here it is `old value < 0`, which
    // is false for every valid word of a semaphore.
    const unsigned encoded_operation = FUTEX_OP(futex_operation, operand, FUTEX_OP_CMP_LT, 0);
    return syscall(SYS_futex, wake_word, FUTEX_WAKE_OP, 1, nullptr, word, encoded_operation) >= 0;
}

// Makes the kernel store `value` in `word` and wakes no thread. Returns false if no memory is mapped at `word`.
bool futex_store(std::uint32_t* word, unsigned value) noexcept {
    std::uint32_t word_without_waiters = 0;
    return futex_update(word, FUTEX_OP_SET, value, &word_without_waiters);
}

} // namespace

NamedSemaphore::NamedSemaphore(NamedSemaphore&& other) noexcept
    : semaphore_(std::exchange(other.semaphore_, nullptr)), fd_(std::exchange(other.fd_, -1)) {}

NamedSemaphore& NamedSemaphore::operator=(NamedSemaphore&& other) noexcept {
    if (this != &other) {
        close();
        semaphore_ = std::exchange(other.semaphore_, nullptr);
        fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
}

NamedSemaphore::~NamedSemaphore() {
    close();
}

void NamedSemaphore::close() noexcept {
    if (semaphore_ != nullptr) {
        munmap(semaphore_, sizeof(Semaphore));
        semaphore_ = nullptr;
    }
    if (fd_ >= 0) {
        ::close(fd_);
        fd_ = -1;
    }
}

int NamedSemaphore::open(const char* path) noexcept {
    NamedSemaphore semaphore;
    // Without O_NONBLOCK, a client that holds a lease (F_SETLEASE) on the file would block the caller.
    semaphore.fd_ = ::open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    struct stat attributes {};
    if (semaphore.fd_ < 0 || fstat(semaphore.fd_, &attributes) != 0) {
        return -errno;
    }
    // Every size is accepted, because a client may have truncated the file. restore() corrects the size.
    if (!S_ISREG(attributes.st_mode)) {
        return -EINVAL;
    }
    void* mapping = mmap(nullptr, sizeof(Semaphore), PROT_READ | PROT_WRITE, MAP_SHARED, semaphore.fd_, 0);
    if (mapping == MAP_FAILED) {
        return -errno;
    }
    semaphore.semaphore_ = static_cast<Semaphore*>(mapping);
    *this = std::move(semaphore);
    return 0;
}

void NamedSemaphore::post() noexcept {
    // The kernel adds to the 32-bit value only, so an overflow cannot change the number of waiters in the high half.
    futex_update(futex_of(*semaphore_), FUTEX_OP_ADD, 1, futex_of(*semaphore_));
}

void NamedSemaphore::restore() noexcept {
    struct stat attributes {};
    if (fstat(fd_, &attributes) == 0 && attributes.st_size < static_cast<off_t>(sizeof(Semaphore))) {
        // If ftruncate fails, the next wait fails with EFAULT.
        [[maybe_unused]] const int status = ftruncate(fd_, sizeof(Semaphore));
    }
    futex_store(&semaphore_->sharing, semaphore_shared);
    // The high half of the word is the number of waiters. With 1, glibc's sem_post always makes the wake-up call.
    futex_store(futex_of(*semaphore_) + 1, 1);
}

bool NamedSemaphore::wait_and_reset(int timeout_ms) noexcept {
    const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    const long status = syscall(SYS_futex, futex_of(*semaphore_), FUTEX_WAIT, 0, &timeout, nullptr, 0);
    // EAGAIN: the value was not 0, so a post came before this call.
    const bool is_woken = status == 0 || errno == EAGAIN || errno == EINTR;
    if (!is_woken && errno == EFAULT) {
        restore();
        // If the file cannot be enlarged, FUTEX_WAIT fails again at once. Pause before the next call.
        poll(nullptr, 0, 1);
    }
    return futex_store(futex_of(*semaphore_), 0) && is_woken;
}

} // namespace gdrkit::usrbio
