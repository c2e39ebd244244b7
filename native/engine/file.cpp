// Opens and closes the files of the copy engine, finds their alignment for O_DIRECT, and counts their uses.
#include "engine/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "common/futex.hpp"
#include "engine/failure.hpp"

namespace gdrkit::engine {
namespace {

constexpr std::uint64_t default_alignment_bytes = 4096;

// Returns the alignment for O_DIRECT that statx reports for this file (Linux 6.1 and newer), but at least 4 KiB. 4 KiB
// suits nearly every disk.
std::uint64_t direct_alignment_bytes(int fd) {
#ifdef STATX_DIOALIGN
    struct statx info {};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
        return std::max<std::uint64_t>({default_alignment_bytes, info.stx_dio_mem_align, info.stx_dio_offset_align});
    }
#else
    (void)fd;
#endif
    return default_alignment_bytes;
}

} // namespace

int File::buffered_fd() {
    if (const int fd = fd_.load(std::memory_order_acquire); fd >= 0) {
        return fd;
    }
    const std::lock_guard lock(open_mutex_);
    if (fd_.load(std::memory_order_relaxed) < 0) {
        Descriptor opened_descriptor(open(path_.c_str(), flags_ | O_CLOEXEC, mode_));
        if (!opened_descriptor) {
            throw make_kernel_error("open", errno);
        }
        owned_descriptor_ = std::move(opened_descriptor);
        fd_.store(owned_descriptor_.get(), std::memory_order_release);
    }
    return fd_.load(std::memory_order_relaxed);
}

int File::direct_fd() {
    if (const int fd = direct_fd_.load(std::memory_order_acquire); fd >= 0) {
        return direct_errno() == 0 ? fd : -1;
    }
    if (direct_errno() != 0) {
        return -1;
    }
    const int fd = buffered_fd();
    const std::lock_guard lock(open_mutex_);
    if (direct_fd_.load(std::memory_order_relaxed) < 0) {
        // This path opens the same file again, even if the file was renamed or removed.
        char path[64];
        std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        const int access_mode = fcntl(fd, F_GETFL) & O_ACCMODE;
        Descriptor opened_descriptor(open(path, access_mode | O_DIRECT | O_CLOEXEC));
        if (!opened_descriptor) {
            disable_direct(errno);
            return -1;
        }
        alignment_bytes_.store(direct_alignment_bytes(opened_descriptor.get()), std::memory_order_relaxed);
        owned_direct_descriptor_ = std::move(opened_descriptor);
        direct_fd_.store(owned_direct_descriptor_.get(), std::memory_order_release);
    }
    return direct_fd_.load(std::memory_order_relaxed);
}

std::uint64_t File::size_bytes() {
    struct stat info {};
    if (fstat(buffered_fd(), &info) != 0) {
        throw make_kernel_error("fstat", errno);
    }
    return static_cast<std::uint64_t>(info.st_size);
}

Residency File::residency_of(std::uint64_t offset, std::uint64_t length) {
    const std::uint64_t size = size_bytes();
    if (offset >= size) {
        return {.state = CacheState::all, .cached_pages_count = 0, .pages_count = 0}; // There is nothing to read.
    }
    return query_residency(buffered_fd(), offset, std::min(length, size - offset));
}

void File::remove_pending(std::uint64_t bytes) noexcept {
    if (!path_.empty() && pending_bytes_.fetch_sub(bytes, std::memory_order_acq_rel) == bytes) {
        close_reopenable_descriptors();
    }
}

bool File::begin_use() noexcept {
    // The use is counted before the flag is read, so that a close that starts now waits for the use or is seen here.
    uses_count_.fetch_add(1);
    if (refuses_uses_.load()) {
        end_use();
        return false;
    }
    return true;
}

void File::end_use() noexcept {
    if (uses_count_.fetch_sub(1) == 1 && refuses_uses_.load()) {
        futex_wake_all(uses_count_);
    }
}

bool File::wait_until_unused(std::chrono::nanoseconds timeout) noexcept {
    return wait_for_word(uses_count_, timeout, [](std::uint32_t count) { return count == 0; });
}

bool File::begin_close(std::chrono::nanoseconds timeout) noexcept {
    return wait_for_word(is_close_in_progress_, timeout, [&](std::uint32_t is_in_progress) {
        return is_in_progress == 0 && is_close_in_progress_.compare_exchange_strong(is_in_progress, 1);
    });
}

void File::end_close() noexcept {
    is_close_in_progress_.store(0);
    futex_wake_all(is_close_in_progress_);
}

void File::close() {
    const std::lock_guard lock(open_mutex_);
    is_closed_.store(true);
    if (uses_count_.load() != 0) {
        return;
    }
    direct_fd_.store(-1, std::memory_order_relaxed);
    fd_.store(-1, std::memory_order_relaxed);
    owned_direct_descriptor_.reset();
    // The kernel frees the descriptor even if close(2) fails, for example because a file server reports that an earlier
    // write failed.
    if (const int fd = owned_descriptor_.release(); fd >= 0 && ::close(fd) != 0) {
        throw make_kernel_error("close", errno);
    }
}

std::shared_ptr<File> File::replace_after_fork() {
    owned_direct_descriptor_.reset();
    const bool is_closed = is_closed_.load() || !owned_descriptor_;
    auto file = std::make_shared<File>(std::move(owned_descriptor_));
    file->refuses_uses_.store(is_closed);
    file->is_closed_.store(is_closed);
    fd_.store(-1, std::memory_order_relaxed);
    direct_fd_.store(-1, std::memory_order_relaxed);
    return file;
}

void File::close_reopenable_descriptors() noexcept {
    if (path_.empty()) {
        return; // There is nothing to close, so the caller need not wait for a worker that holds the lock.
    }
    const std::lock_guard lock(open_mutex_);
    direct_fd_.store(-1, std::memory_order_relaxed);
    fd_.store(-1, std::memory_order_relaxed);
    owned_direct_descriptor_.reset();
    owned_descriptor_.reset();
}

} // namespace gdrkit::engine
