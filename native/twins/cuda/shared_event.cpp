// Implements the state of an interprocess event. A futex wakes waiting threads, and a lock on a byte of the file shows
// that a record is unfinished.
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
constexpr timespec check_interval{0, 50'000'000}; // 50 ms

// Make the argument of fcntl for a lock of the byte that belongs to a record. The byte may be behind the end of the
// file.
struct flock make_lock_request(std::uint32_t record_number, short lock_type) {
    struct flock lock {};
    lock.l_type = lock_type;
    lock.l_whence = SEEK_SET;
    lock.l_start = record_number;
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
    std::uint32_t last_record_number = state_->last_record_number.load();
    while (true) {
        // Lock the byte before another process can see the number.
        const std::uint32_t record_number = last_record_number + 1;
        unfinished_record_numbers_.insert(record_number);
        set_lock(record_number, F_RDLCK);
        if (state_->last_record_number.compare_exchange_strong(last_record_number, record_number)) {
            return record_number;
        }
        unfinished_record_numbers_.erase(record_number); // another process has taken this record number
        set_lock(record_number, F_UNLCK);
    }
}

void SharedEvent::end_record(std::uint32_t record_number) {
    {
        std::lock_guard lock(mutex_);
        unfinished_record_numbers_.erase(record_number);
        set_lock(record_number, F_UNLCK);
    }
    state_->ended_count.fetch_add(1);
    syscall(SYS_futex, &state_->ended_count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedEvent::set_lock(std::uint32_t record_number, short lock_type) {
    struct flock lock = make_lock_request(record_number, lock_type);
    fcntl(fd_.get(), F_OFD_SETLK, &lock);
}

bool SharedEvent::is_done(std::uint32_t record_number) {
    {
        std::lock_guard lock(mutex_);
        if (unfinished_record_numbers_.contains(record_number)) {
            return false;
        }
    }
    struct flock conflicting_lock = make_lock_request(record_number, F_WRLCK);
    return fcntl(fd_.get(), F_OFD_GETLK, &conflicting_lock) != 0 || conflicting_lock.l_type == F_UNLCK;
}

void SharedEvent::wait_until_done(std::uint32_t record_number) {
    for (std::uint32_t ended_count = state_->ended_count.load(); !is_done(record_number);
         ended_count = state_->ended_count.load()) {
        syscall(SYS_futex, &state_->ended_count, FUTEX_WAIT, ended_count, &check_interval, nullptr, 0);
    }
}

} // namespace gdrkit::twin::cuda
