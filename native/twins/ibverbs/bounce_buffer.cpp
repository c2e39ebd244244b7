// The bounce buffer, a sealed memfd through which payload moves between client memory and a peer.

#include "ibverbs/bounce_buffer.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace gdrkit::twin::verbs {

namespace {

// With these seals no process can shrink the memfd, so access to a mapping of the memfd never raises SIGBUS.
constexpr int required_seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;

} // namespace

std::unique_ptr<BounceBuffer> BounceBuffer::make(std::size_t size_bytes) {
    Fd fd(memfd_create("gdrkit-bounce", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd || ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0 ||
        fcntl(fd.get(), F_ADD_SEALS, required_seals) != 0) {
        return nullptr;
    }
    return map(std::move(fd), size_bytes);
}

std::unique_ptr<BounceBuffer> BounceBuffer::adopt(Fd fd, std::size_t size_bytes) {
    struct stat file_status {};
    if (fstat(fd.get(), &file_status) != 0) {
        return nullptr;
    }
    if (fcntl(fd.get(), F_GET_SEALS) != required_seals || static_cast<std::size_t>(file_status.st_size) != size_bytes) {
        errno = EINVAL;
        return nullptr;
    }
    return map(std::move(fd), size_bytes);
}

std::unique_ptr<BounceBuffer> BounceBuffer::map(Fd fd, std::size_t size_bytes) {
    void* const mapped_memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (mapped_memory == MAP_FAILED) {
        return nullptr;
    }
    return std::unique_ptr<BounceBuffer>(
        new BounceBuffer(std::move(fd), static_cast<std::byte*>(mapped_memory), size_bytes));
}

BounceBuffer::~BounceBuffer() {
    munmap(data_, size_bytes_);
}

// copy_in and copy_out use raw system calls, to bypass the libc functions that ThreadSanitizer intercepts. Their copies
// emulate the DMA of a device. A program knows from completions when the DMA has ended, and another process may poll
// these completions. ThreadSanitizer does not know this order and would report data races.

int BounceBuffer::copy_in(std::size_t offset, const void* client_memory, std::size_t size_bytes) {
    const char* source = static_cast<const char*>(client_memory);
    while (size_bytes > 0) {
        const long moved_bytes = syscall(SYS_pwrite64, fd_.get(), source, size_bytes, offset);
        if (moved_bytes < 0 && errno == EINTR) {
            continue;
        }
        if (moved_bytes <= 0) {
            return moved_bytes == 0 ? EIO : errno;
        }
        source += moved_bytes;
        offset += static_cast<std::size_t>(moved_bytes);
        size_bytes -= static_cast<std::size_t>(moved_bytes);
    }
    return 0;
}

int BounceBuffer::copy_out(std::size_t offset, void* client_memory, std::size_t size_bytes) const {
    char* target = static_cast<char*>(client_memory);
    while (size_bytes > 0) {
        const long moved_bytes = syscall(SYS_pread64, fd_.get(), target, size_bytes, offset);
        if (moved_bytes < 0 && errno == EINTR) {
            continue;
        }
        if (moved_bytes <= 0) {
            return moved_bytes == 0 ? EIO : errno;
        }
        target += moved_bytes;
        offset += static_cast<std::size_t>(moved_bytes);
        size_bytes -= static_cast<std::size_t>(moved_bytes);
    }
    return 0;
}

#if defined(__x86_64__)

namespace {

// Copy without memcpy, which ThreadSanitizer intercepts too.
void copy_unobserved(std::byte* target, const std::byte* source, std::size_t size_bytes) {
    asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(size_bytes) : : "memory");
}

} // namespace

void BounceBuffer::copy_in_mapped(std::size_t offset, const std::byte* memory, std::size_t size_bytes) {
    copy_unobserved(data_ + offset, memory, size_bytes);
}

void BounceBuffer::copy_out_mapped(std::size_t offset, std::byte* memory, std::size_t size_bytes) const {
    copy_unobserved(memory, data_ + offset, size_bytes);
}

#else

// Without rep movsb, the functions copy by system calls, which ThreadSanitizer does not intercept either.

void BounceBuffer::copy_in_mapped(std::size_t offset, const std::byte* memory, std::size_t size_bytes) {
    copy_in(offset, memory, size_bytes);
}

void BounceBuffer::copy_out_mapped(std::size_t offset, std::byte* memory, std::size_t size_bytes) const {
    copy_out(offset, memory, size_bytes);
}

#endif

} // namespace gdrkit::twin::verbs
