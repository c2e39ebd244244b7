// Implements the pipe for write payloads by vmsplice and read.

#include "ibverbs/pipe.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace gdrkit::twin::verbs {
namespace {

// The pipe is used only on systems with pages of this size, because count_pages() assumes it.
constexpr std::uint64_t small_page_bytes = 4096;
// The largest capacity that the kernel grants an unprivileged user by default (pipe-max-size). If the user has too many
// large pipes already, F_SETPIPE_SZ fails and the pipe keeps its default capacity.
constexpr int requested_capacity_bytes = 1 << 20;

} // namespace

std::unique_ptr<Pipe> Pipe::make() {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC | O_NONBLOCK) != 0) {
        return nullptr;
    }
    Fd reader(fds[0]), writer(fds[1]);
    fcntl(writer.get(), F_SETPIPE_SZ, requested_capacity_bytes);
    const int capacity_bytes = fcntl(writer.get(), F_GETPIPE_SZ);
    auto pipe = std::unique_ptr<Pipe>(new Pipe(std::move(reader), std::move(writer), 0));
    if (sysconf(_SC_PAGESIZE) == static_cast<long>(small_page_bytes) && capacity_bytes > 0 && pipe->can_splice()) {
        pipe->max_pages_ = static_cast<std::uint32_t>(static_cast<std::uint64_t>(capacity_bytes) / small_page_bytes);
    }
    return pipe;
}

// Try vmsplice with one byte. Return whether the byte came out of the pipe.
bool Pipe::can_splice() {
    const char sent_byte = 1;
    char received_byte = 0;
    return splice_in(&sent_byte, 1) == 0 && read(&received_byte, 1) == 0 && received_byte == sent_byte;
}

std::unique_ptr<Pipe> Pipe::adopt(Fd fd) {
    // Open the pipe again. The new file description has its own O_NONBLOCK flag, which the peer cannot clear.
    char proc_path[64];
    std::snprintf(proc_path, sizeof proc_path, "/proc/self/fd/%d", fd.get());
    if (fcntl(fd.get(), F_GETPIPE_SZ) < 0) {
        return nullptr;
    }
    Fd reader(open(proc_path, O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    return reader ? std::unique_ptr<Pipe>(new Pipe(std::move(reader), Fd(), 0)) : nullptr;
}

std::uint32_t Pipe::count_pages(std::uint64_t address, std::uint64_t size_bytes) {
    return size_bytes == 0 ? 0
                           : static_cast<std::uint32_t>((address + size_bytes - 1) / small_page_bytes -
                                                        address / small_page_bytes + 1);
}

int Pipe::splice_in(const void* memory, std::size_t size_bytes) {
    iovec range{const_cast<void*>(memory), size_bytes};
    while (range.iov_len > 0) {
        const long moved_bytes = syscall(SYS_vmsplice, writer_.get(), &range, 1, SPLICE_F_NONBLOCK);
        if (moved_bytes < 0 && errno == EINTR) {
            continue;
        }
        if (moved_bytes <= 0) {
            return moved_bytes == 0 ? EFAULT : errno;
        }
        range.iov_base = static_cast<char*>(range.iov_base) + moved_bytes;
        range.iov_len -= static_cast<std::size_t>(moved_bytes);
    }
    return 0;
}

// One read call removes all bytes of a chunk at once. So it returns the whole chunk or, after drain(), nothing.
int Pipe::read(void* memory, std::size_t size_bytes) {
    long moved_bytes = 0;
    do {
        moved_bytes = syscall(SYS_read, reader_.get(), memory, size_bytes);
    } while (moved_bytes < 0 && errno == EINTR);
    if (moved_bytes >= 0 && static_cast<std::size_t>(moved_bytes) < size_bytes) {
        // The read was short. If data is left in the pipe, the end of the memory is not mapped. If none is left, the
        // pipe held fewer bytes than requested.
        char next_byte = 0;
        return syscall(SYS_read, reader_.get(), &next_byte, 1) == 1 ? EFAULT : EPIPE;
    }
    return moved_bytes >= 0 ? 0 : errno == EAGAIN ? EPIPE : errno;
}

namespace {

// Return how many of the ranges a transfer of `transferred_bytes` bytes has completed. Store in *partial_bytes how many
// bytes of the next range it has transferred.
std::size_t count_complete_ranges(std::span<const iovec> ranges, std::size_t transferred_bytes,
                                  std::size_t* partial_bytes) {
    std::size_t remaining_bytes = transferred_bytes;
    std::size_t complete_count = 0;
    for (; complete_count < ranges.size() && remaining_bytes >= ranges[complete_count].iov_len; ++complete_count) {
        remaining_bytes -= ranges[complete_count].iov_len;
    }
    *partial_bytes = remaining_bytes;
    return complete_count;
}

} // namespace

int Pipe::splice_in(std::span<const iovec> ranges, std::size_t* succeeded_count) {
    long moved_bytes = 0;
    do {
        moved_bytes = syscall(SYS_vmsplice, writer_.get(), ranges.data(), ranges.size(), SPLICE_F_NONBLOCK);
    } while (moved_bytes < 0 && errno == EINTR);
    const int error = moved_bytes < 0 ? errno : 0;
    std::size_t partial_bytes = 0;
    *succeeded_count =
        count_complete_ranges(ranges, moved_bytes > 0 ? static_cast<std::size_t>(moved_bytes) : 0, &partial_bytes);
    // vmsplice may stop early without an error. Then splice the remaining ranges one by one, until all are spliced or a
    // call returns an error.
    while (error == 0 && *succeeded_count < ranges.size()) {
        const iovec& next_range = ranges[*succeeded_count];
        if (const int range_error = splice_in(static_cast<const char*>(next_range.iov_base) + partial_bytes,
                                              next_range.iov_len - partial_bytes);
            range_error != 0) {
            return range_error;
        }
        partial_bytes = 0;
        ++*succeeded_count;
    }
    return error;
}

// One readv call removes all the data at once, as in the function for one range.
int Pipe::read(std::span<const iovec> ranges, std::size_t* succeeded_count) {
    long moved_bytes = 0;
    do {
        moved_bytes = syscall(SYS_readv, reader_.get(), ranges.data(), ranges.size());
    } while (moved_bytes < 0 && errno == EINTR);
    if (moved_bytes < 0) {
        const int error = errno;
        *succeeded_count = 0;
        return error == EAGAIN ? EPIPE : error;
    }
    std::size_t partial_bytes = 0;
    *succeeded_count = count_complete_ranges(ranges, static_cast<std::size_t>(moved_bytes), &partial_bytes);
    if (*succeeded_count == ranges.size()) {
        return 0;
    }
    char next_byte = 0;
    return syscall(SYS_read, reader_.get(), &next_byte, 1) == 1 ? EFAULT : EPIPE;
}

void Pipe::drain() {
    char bytes[4096];
    while (syscall(SYS_read, reader_.get(), bytes, sizeof bytes) > 0) {
    }
}

} // namespace gdrkit::twin::verbs
