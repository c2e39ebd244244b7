#include "usrbio/ring/named_semaphore.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

namespace gdrkit::usrbio {

namespace {

// Changes a word in the kernel, and wakes at most one thread that waits on `woken`; false: there is no memory at
// `word`.
bool change(std::uint32_t* word, int operation, unsigned argument, std::uint32_t* woken) noexcept {
    // Compared with the old value to decide whether waiters of `word` itself are woken: a value below 0 does not occur.
    const unsigned encoded = FUTEX_OP(operation, argument, FUTEX_OP_CMP_LT, 0);
    return syscall(SYS_futex, woken, FUTEX_WAKE_OP, 1, nullptr, word, encoded) >= 0;
}

bool store(std::uint32_t* word, unsigned value) noexcept {
    std::uint32_t nobody = 0;
    return change(word, FUTEX_OP_SET, value, &nobody);
}

} // namespace

NamedSemaphore::NamedSemaphore(NamedSemaphore&& other) noexcept
    : words_(std::exchange(other.words_, nullptr)), file_(std::exchange(other.file_, -1)) {}

NamedSemaphore& NamedSemaphore::operator=(NamedSemaphore&& other) noexcept {
    if (this != &other) {
        close();
        words_ = std::exchange(other.words_, nullptr);
        file_ = std::exchange(other.file_, -1);
    }
    return *this;
}

NamedSemaphore::~NamedSemaphore() {
    close();
}

void NamedSemaphore::close() noexcept {
    if (words_ != nullptr) {
        munmap(words_, sizeof(Semaphore));
        words_ = nullptr;
    }
    if (file_ >= 0) {
        ::close(file_);
        file_ = -1;
    }
}

int NamedSemaphore::open(const char* path) noexcept {
    NamedSemaphore opened;
    // O_NONBLOCK: a FIFO of that name must not hold up the caller.
    opened.file_ = ::open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    struct stat found {};
    if (opened.file_ < 0 || fstat(opened.file_, &found) != 0) {
        return -errno;
    }
    if (!S_ISREG(found.st_mode)) { // Of any size: a client may have cut it short, and the agent restores it.
        return -EINVAL;
    }
    void* mapped = mmap(nullptr, sizeof(Semaphore), PROT_READ | PROT_WRITE, MAP_SHARED, opened.file_, 0);
    if (mapped == MAP_FAILED) {
        return -errno;
    }
    opened.words_ = static_cast<Semaphore*>(mapped);
    *this = std::move(opened);
    return 0;
}

void NamedSemaphore::post() noexcept {
    // The kernel adds to the value alone: no overflow reaches the count of waiters.
    change(futex_of(*words_), FUTEX_OP_ADD, 1, futex_of(*words_));
}

void NamedSemaphore::restore() noexcept {
    struct stat found {};
    if (fstat(file_, &found) == 0 && found.st_size < static_cast<off_t>(sizeof(Semaphore))) {
        // A failure is seen at the next wait, as EFAULT.
        [[maybe_unused]] const int status = ftruncate(file_, sizeof(Semaphore));
    }
    store(&words_->sharing, semaphore_shared);
    store(futex_of(*words_) + 1, 1);
}

bool NamedSemaphore::take_all(int timeout_ms) noexcept {
    const timespec limit{timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    const long status = syscall(SYS_futex, futex_of(*words_), FUTEX_WAIT, 0, &limit, nullptr, 0);
    const bool is_woken = status == 0 || errno == EAGAIN || errno == EINTR;
    if (!is_woken && errno == EFAULT) {
        restore();
        // If the file cannot get its size back, FUTEX_WAIT fails at once again: pause before the next call.
        poll(nullptr, 0, 1);
    }
    return store(futex_of(*words_), 0) && is_woken;
}

} // namespace gdrkit::usrbio
