#include "ibverbs/bounce.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace gdrkit::twin::verbs {

std::unique_ptr<Bounce> Bounce::make() {
    Fd fd(memfd_create("gdrkit-bounce", MFD_CLOEXEC));
    if (!fd || ftruncate(fd.get(), chunk_bytes_most) != 0) {
        return nullptr;
    }
    void* const data = mmap(nullptr, chunk_bytes_most, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) {
        return nullptr;
    }
    return std::unique_ptr<Bounce>(new Bounce(std::move(fd), static_cast<std::byte*>(data)));
}

Bounce::~Bounce() {
    munmap(data_, chunk_bytes_most);
}

// The system is called directly, past the functions of libc that a thread sanitizer watches: to the client this is a
// device that moves data, and what orders it are completions and messages, also those of other processes, of which a
// sanitizer knows nothing.

int Bounce::load(std::size_t at, const void* memory, std::size_t size) {
    const char* from = static_cast<const char*>(memory);
    while (size > 0) {
        const long moved = syscall(SYS_pwrite64, fd_.get(), from, size, at);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            return moved == 0 ? EIO : errno;
        }
        from += moved;
        at += static_cast<std::size_t>(moved);
        size -= static_cast<std::size_t>(moved);
    }
    return 0;
}

int Bounce::store(std::size_t at, void* memory, std::size_t size) const {
    char* to = static_cast<char*>(memory);
    while (size > 0) {
        const long moved = syscall(SYS_pread64, fd_.get(), to, size, at);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            return moved == 0 ? EIO : errno;
        }
        to += moved;
        at += static_cast<std::size_t>(moved);
        size -= static_cast<std::size_t>(moved);
    }
    return 0;
}

} // namespace gdrkit::twin::verbs
