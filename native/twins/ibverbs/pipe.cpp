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

constexpr std::uint64_t page_bytes = 4096;
// The kernel's default limit per user (pipe-max-size). If the user has too many large pipes, the pipe keeps its default
// size.
constexpr int wanted_bytes = 1 << 20;

} // namespace

std::unique_ptr<Pipe> Pipe::make() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        return nullptr;
    }
    Fd reader(ends[0]), writer(ends[1]);
    fcntl(writer.get(), F_SETPIPE_SZ, wanted_bytes);
    const int bytes = fcntl(writer.get(), F_GETPIPE_SZ);
    auto created = std::unique_ptr<Pipe>(new Pipe(std::move(reader), std::move(writer), 0));
    if (sysconf(_SC_PAGESIZE) == static_cast<long>(page_bytes) && bytes > 0 && created->can_splice()) {
        created->max_pages_ = static_cast<std::uint32_t>(static_cast<std::uint64_t>(bytes) / page_bytes);
    }
    return created;
}

bool Pipe::can_splice() {
    const char one = 1;
    char back = 0;
    return splice_in(&one, 1) == 0 && read(&back, 1) == 0 && back == one;
}

std::unique_ptr<Pipe> Pipe::adopt(Fd fd) {
    // Opened again, so that O_NONBLOCK on this file description is set by this process alone.
    char link[64];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd.get());
    if (fcntl(fd.get(), F_GETPIPE_SZ) < 0) {
        return nullptr;
    }
    Fd reader(open(link, O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    return reader ? std::unique_ptr<Pipe>(new Pipe(std::move(reader), Fd(), 0)) : nullptr;
}

std::uint32_t Pipe::pages_of(std::uint64_t address, std::uint64_t size) {
    return size == 0 ? 0 : static_cast<std::uint32_t>((address + size - 1) / page_bytes - address / page_bytes + 1);
}

int Pipe::splice_in(const void* memory, std::size_t size) {
    iovec part{const_cast<void*>(memory), size};
    while (part.iov_len > 0) {
        const long moved = syscall(SYS_vmsplice, writer_.get(), &part, 1, SPLICE_F_NONBLOCK);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            return moved == 0 ? EFAULT : errno;
        }
        part.iov_base = static_cast<char*>(part.iov_base) + moved;
        part.iov_len -= static_cast<std::size_t>(moved);
    }
    return 0;
}

// One read call takes all the data atomically: either the whole chunk or, after drain(), nothing.
int Pipe::read(void* memory, std::size_t size) {
    long moved = 0;
    do {
        moved = syscall(SYS_read, reader_.get(), memory, size);
    } while (moved < 0 && errno == EINTR);
    if (moved >= 0 && static_cast<std::size_t>(moved) < size) {
        // A short read means that the pipe held less data, or that the rest of the memory is not mapped.
        char probe = 0;
        return syscall(SYS_read, reader_.get(), &probe, 1) == 1 ? EFAULT : EPIPE;
    }
    return moved >= 0 ? 0 : errno == EAGAIN ? EPIPE : errno;
}

namespace {

// Return how many parts `bytes` fills completely, and store the bytes in the next part in *rest_bytes.
std::size_t count_full_parts(std::span<const iovec> parts, std::size_t bytes, std::size_t* rest_bytes) {
    std::size_t count = 0;
    for (; count < parts.size() && bytes >= parts[count].iov_len; ++count) {
        bytes -= parts[count].iov_len;
    }
    *rest_bytes = bytes;
    return count;
}

} // namespace

int Pipe::splice_in(std::span<const iovec> parts, std::size_t* succeeded) {
    long moved = 0;
    do {
        moved = syscall(SYS_vmsplice, writer_.get(), parts.data(), parts.size(), SPLICE_F_NONBLOCK);
    } while (moved < 0 && errno == EINTR);
    const int error = moved < 0 ? errno : 0;
    std::size_t done = 0;
    *succeeded = count_full_parts(parts, moved > 0 ? static_cast<std::size_t>(moved) : 0, &done);
    // The call may stop early. Then the next call returns the error or continues.
    while (error == 0 && *succeeded < parts.size()) {
        const iovec& next = parts[*succeeded];
        if (const int number = splice_in(static_cast<const char*>(next.iov_base) + done, next.iov_len - done);
            number != 0) {
            return number;
        }
        done = 0;
        ++*succeeded;
    }
    return error;
}

// One readv call, for the same reason as above.
int Pipe::read(std::span<const iovec> parts, std::size_t* succeeded) {
    long moved = 0;
    do {
        moved = syscall(SYS_readv, reader_.get(), parts.data(), parts.size());
    } while (moved < 0 && errno == EINTR);
    if (moved < 0) {
        const int error = errno;
        *succeeded = 0;
        return error == EAGAIN ? EPIPE : error;
    }
    std::size_t rest_bytes = 0;
    *succeeded = count_full_parts(parts, static_cast<std::size_t>(moved), &rest_bytes);
    if (*succeeded == parts.size()) {
        return 0;
    }
    char probe = 0;
    return syscall(SYS_read, reader_.get(), &probe, 1) == 1 ? EFAULT : EPIPE;
}

void Pipe::drain() {
    char bytes[4096];
    while (syscall(SYS_read, reader_.get(), bytes, sizeof bytes) > 0) {
    }
}

} // namespace gdrkit::twin::verbs
