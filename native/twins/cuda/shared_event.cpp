// Implements the state of an interprocess event by a futex and locks of the bytes of its file.
#include "cuda/shared_event.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "model/dmabuf.hpp"

namespace gdrkit::twin::cuda {
namespace {

constexpr std::uint64_t state_bytes = 4096;
// A waiting thread checks at this interval whether the recording process has ended.
constexpr timespec check_interval{0, 50'000'000};

// Return a lock of the byte that belongs to a record. The byte may be behind the end of the file.
struct flock lock_of(std::uint32_t number, short type) {
    struct flock lock {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = number;
    lock.l_len = 1;
    return lock;
}

} // namespace

std::shared_ptr<SharedEvent> SharedEvent::map(Fd fd) {
    void* const memory = mmap(nullptr, state_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    return std::shared_ptr<SharedEvent>(new SharedEvent(std::move(fd), static_cast<State*>(memory)));
}

std::shared_ptr<SharedEvent> SharedEvent::make() {
    Fd fd(make_device_memory(state_bytes));
    return fd ? map(std::move(fd)) : nullptr;
}

std::shared_ptr<SharedEvent> SharedEvent::adopt(Fd fd) {
    struct stat status {};
    const bool is_valid = is_device_memory(fd.get()) && fstat(fd.get(), &status) == 0 &&
                          static_cast<std::uint64_t>(status.st_size) == state_bytes;
    return is_valid ? map(std::move(fd)) : nullptr;
}

SharedEvent::~SharedEvent() {
    munmap(state_, state_bytes);
}

std::uint32_t SharedEvent::begin_record() {
    std::lock_guard lock(mutex_);
    std::uint32_t last = state_->begun.load();
    while (true) {
        // Lock the byte before another process can see the number.
        const std::uint32_t number = last + 1;
        unfinished_.insert(number);
        set_lock(number, F_RDLCK);
        if (state_->begun.compare_exchange_strong(last, number)) {
            return number;
        }
        unfinished_.erase(number); // another process has this number
        set_lock(number, F_UNLCK);
    }
}

void SharedEvent::end_record(std::uint32_t number) {
    {
        std::lock_guard lock(mutex_);
        unfinished_.erase(number);
        set_lock(number, F_UNLCK);
    }
    state_->ended.fetch_add(1);
    syscall(SYS_futex, &state_->ended, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedEvent::set_lock(std::uint32_t number, short type) {
    struct flock lock = lock_of(number, type);
    fcntl(fd_.get(), F_OFD_SETLK, &lock);
}

bool SharedEvent::is_done(std::uint32_t number) {
    {
        std::lock_guard lock(mutex_);
        if (unfinished_.contains(number)) {
            return false;
        }
    }
    struct flock conflicting = lock_of(number, F_WRLCK);
    return fcntl(fd_.get(), F_OFD_GETLK, &conflicting) != 0 || conflicting.l_type == F_UNLCK;
}

void SharedEvent::wait_until_done(std::uint32_t number) {
    for (std::uint32_t ended = state_->ended.load(); !is_done(number); ended = state_->ended.load()) {
        syscall(SYS_futex, &state_->ended, FUTEX_WAIT, ended, &check_interval, nullptr, 0);
    }
}

} // namespace gdrkit::twin::cuda
