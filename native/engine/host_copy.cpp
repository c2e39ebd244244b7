#include "engine/host_copy.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace gdrkit::engine {
namespace {

// The kernel moves at most 0x7ffff000 bytes per call.
constexpr std::uint64_t call_bytes_max = 1U << 30U;

Failure refused(const char* operation, int number) {
    return {.api = Api::kernel, .operation = operation, .number = number, .name = {}};
}

std::uint64_t down(std::uint64_t value, std::uint64_t alignment) {
    return value & ~(alignment - 1);
}

std::uint64_t up(std::uint64_t value, std::uint64_t alignment) {
    return down(value + alignment - 1, alignment);
}

// Calls until everything is moved, a call moves nothing, or a call fails.
template <typename Call> Moved repeat(const char* operation, std::uint64_t length, const Call& call) {
    Moved moved;
    while (moved.bytes < length) {
        const ssize_t got = call(moved.bytes, std::min(length - moved.bytes, call_bytes_max));
        if (got > 0) {
            moved.bytes += static_cast<std::uint64_t>(got);
        } else if (got == 0) {
            break;
        } else if (errno != EINTR) {
            moved.failure = refused(operation, errno);
            break;
        }
    }
    return moved;
}

} // namespace

Moved read_buffered(File& file, std::uint64_t offset, std::uint64_t length, std::byte* to) {
    const int fd = file.buffered();
    return repeat("pread", length, [&](std::uint64_t at, std::uint64_t want) {
        return pread(fd, to + at, want, static_cast<off_t>(offset + at));
    });
}

Moved write_buffered(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* from) {
    const int fd = file.buffered();
    return repeat("pwrite", length, [&](std::uint64_t at, std::uint64_t want) {
        return pwrite(fd, from + at, want, static_cast<off_t>(offset + at));
    });
}

Moved read_direct(File& file, std::uint64_t offset, std::uint64_t length, std::byte* block) {
    const int fd = file.direct();
    const std::uint64_t lead = lead_of(file, offset);
    if (fd < 0) {
        return read_buffered(file, offset, length, block + lead);
    }
    const std::uint64_t alignment = file.alignment_bytes();
    const std::uint64_t begin = offset - lead;
    const std::uint64_t wanted = up(lead + length, alignment);
    Moved moved = repeat("pread", wanted, [&](std::uint64_t at, std::uint64_t want) -> ssize_t {
        // After a partial block, the file ends there, unless it is growing.
        return (at & (alignment - 1)) != 0 ? 0 : pread(fd, block + at, want, static_cast<off_t>(begin + at));
    });
    if (moved.failure && moved.failure->number == EINVAL && moved.bytes == 0) {
        // This file system accepts O_DIRECT in open(2) but not the I/O.
        file.refuse_direct(EINVAL);
        return read_buffered(file, offset, length, block + lead);
    }
    moved.bytes = std::min(moved.bytes > lead ? moved.bytes - lead : 0, length);
    moved.direct = true;
    if (moved.bytes < length && !moved.failure) {
        Moved rest = read_buffered(file, offset + moved.bytes, length - moved.bytes, block + lead + moved.bytes);
        moved.bytes += rest.bytes;
        moved.failure = rest.failure;
    }
    return moved;
}

Moved write_direct(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* block) {
    const int fd = file.direct();
    const std::uint64_t alignment = file.alignment_bytes();
    const std::byte* const from = block + lead_of(file, offset);
    const std::uint64_t head = std::min(length, up(offset, alignment) - offset);
    const std::uint64_t middle = fd < 0 ? 0 : down(length - head, alignment);
    if (middle == 0) {
        return write_buffered(file, offset, length, from);
    }
    Moved moved = write_buffered(file, offset, head, from);
    if (moved.bytes < head) {
        return moved;
    }
    const Moved whole = repeat("pwrite", middle, [&](std::uint64_t at, std::uint64_t want) -> ssize_t {
        return (at & (alignment - 1)) != 0 ? 0
                                           : pwrite(fd, from + head + at, want, static_cast<off_t>(offset + head + at));
    });
    const bool refused_all = whole.failure && whole.failure->number == EINVAL && whole.bytes == 0;
    moved.bytes += whole.bytes;
    moved.direct = !refused_all;
    if (refused_all) {
        file.refuse_direct(EINVAL);
    } else if (whole.failure) {
        moved.failure = whole.failure;
        return moved;
    }
    const Moved rest = write_buffered(file, offset + moved.bytes, length - moved.bytes, from + moved.bytes);
    moved.bytes += rest.bytes;
    moved.failure = rest.failure;
    return moved;
}

} // namespace gdrkit::engine
