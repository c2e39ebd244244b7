// Implements the state of an interprocess event by a futex and a lock of its file.
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

struct flock whole_file(short type) {
    struct flock lock {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
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
    if (unfinished_records_++ == 0) {
        struct flock shared = whole_file(F_RDLCK);
        fcntl(fd_.get(), F_OFD_SETLK, &shared);
    }
    return state_->begun.fetch_add(1) + 1;
}

void SharedEvent::end_record(std::uint32_t number) {
    std::uint32_t done = state_->done.load();
    while (!has_reached(number) && !state_->done.compare_exchange_weak(done, number)) {
    }
    syscall(SYS_futex, &state_->done, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    std::lock_guard lock(mutex_);
    if (--unfinished_records_ == 0) {
        struct flock unlocked = whole_file(F_UNLCK);
        fcntl(fd_.get(), F_OFD_SETLK, &unlocked);
    }
}

bool SharedEvent::has_reached(std::uint32_t number) const {
    // The numbers may wrap around.
    return static_cast<std::int32_t>(state_->done.load() - number) >= 0;
}

bool SharedEvent::is_being_recorded() {
    {
        std::lock_guard lock(mutex_);
        if (unfinished_records_ != 0) {
            return true;
        }
    }
    struct flock conflicting = whole_file(F_WRLCK);
    return fcntl(fd_.get(), F_OFD_GETLK, &conflicting) == 0 && conflicting.l_type != F_UNLCK;
}

bool SharedEvent::is_done(std::uint32_t number) {
    // A process locks the file before it numbers a record, and unlocks it after the record is done. So if no process
    // has the lock, all processes with unfinished records have ended.
    return has_reached(number) || !is_being_recorded();
}

void SharedEvent::wait_until_done(std::uint32_t number) {
    for (std::uint32_t done = state_->done.load(); !is_done(number); done = state_->done.load()) {
        syscall(SYS_futex, &state_->done, FUTEX_WAIT, done, &check_interval, nullptr, 0);
    }
}

} // namespace gdrkit::twin::cuda
