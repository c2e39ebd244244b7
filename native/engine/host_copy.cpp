#include "engine/host_copy.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace gdrkit::engine {
namespace {

// The kernel moves at most 0x7ffff000 bytes per call.
constexpr std::uint64_t call_bytes_max = 1U << 30U;

Failure kernel_failure(const char* operation, int number) {
    return {.api = Api::kernel, .operation = operation, .number = number, .name = {}};
}

std::uint64_t round_down(std::uint64_t value, std::uint64_t alignment) {
    return value & ~(alignment - 1);
}

std::uint64_t round_up(std::uint64_t value, std::uint64_t alignment) {
    return round_down(value + alignment - 1, alignment);
}

// Repeats `call` until all bytes are moved, a call moves none, or a call fails.
template <typename Call> IoResult repeat_call(const char* operation, std::uint64_t length, const Call& call) {
    IoResult result;
    while (result.bytes < length) {
        const ssize_t count = call(result.bytes, std::min(length - result.bytes, call_bytes_max));
        if (count > 0) {
            result.bytes += static_cast<std::uint64_t>(count);
        } else if (count == 0) {
            break;
        } else if (errno != EINTR) {
            result.failure = kernel_failure(operation, errno);
            break;
        }
    }
    return result;
}

} // namespace

IoResult read_buffered(File& file, std::uint64_t offset, std::uint64_t length, std::byte* to) {
    const int fd = file.buffered();
    return repeat_call("pread", length, [&](std::uint64_t done, std::uint64_t count) {
        return pread(fd, to + done, count, static_cast<off_t>(offset + done));
    });
}

IoResult write_buffered(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* from) {
    const int fd = file.buffered();
    return repeat_call("pwrite", length, [&](std::uint64_t done, std::uint64_t count) {
        return pwrite(fd, from + done, count, static_cast<off_t>(offset + done));
    });
}

IoResult read_direct(File& file, std::uint64_t offset, std::uint64_t length, std::byte* block) {
    const int fd = file.direct();
    const std::uint64_t lead = leading_bytes(file, offset);
    if (fd < 0) {
        return read_buffered(file, offset, length, block + lead);
    }
    const std::uint64_t alignment = file.alignment_bytes();
    const std::uint64_t begin = offset - lead;
    const std::uint64_t aligned_length = round_up(lead + length, alignment);
    IoResult result = repeat_call("pread", aligned_length, [&](std::uint64_t done, std::uint64_t count) -> ssize_t {
        // After a partial block, the file ends there, unless it is growing.
        return (done & (alignment - 1)) != 0 ? 0 : pread(fd, block + done, count, static_cast<off_t>(begin + done));
    });
    if (result.failure && result.failure->number == EINVAL && result.bytes == 0) {
        // This file system accepts O_DIRECT in open(2) but not the I/O.
        file.set_direct_refusal(EINVAL);
        return read_buffered(file, offset, length, block + lead);
    }
    result.bytes = std::min(result.bytes > lead ? result.bytes - lead : 0, length);
    result.direct = true;
    if (result.bytes < length && !result.failure) {
        IoResult rest = read_buffered(file, offset + result.bytes, length - result.bytes, block + lead + result.bytes);
        result.bytes += rest.bytes;
        result.failure = rest.failure;
    }
    return result;
}

IoResult write_direct(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* block) {
    const int fd = file.direct();
    const std::uint64_t alignment = file.alignment_bytes();
    const std::byte* const from = block + leading_bytes(file, offset);
    const std::uint64_t head = std::min(length, round_up(offset, alignment) - offset);
    const std::uint64_t middle = fd < 0 ? 0 : round_down(length - head, alignment);
    if (middle == 0) {
        return write_buffered(file, offset, length, from);
    }
    IoResult result = write_buffered(file, offset, head, from);
    if (result.bytes < head) {
        return result;
    }
    const IoResult aligned = repeat_call("pwrite", middle, [&](std::uint64_t done, std::uint64_t count) -> ssize_t {
        return (done & (alignment - 1)) != 0
                   ? 0
                   : pwrite(fd, from + head + done, count, static_cast<off_t>(offset + head + done));
    });
    const bool refused_direct = aligned.failure && aligned.failure->number == EINVAL && aligned.bytes == 0;
    result.bytes += aligned.bytes;
    result.direct = !refused_direct;
    if (refused_direct) {
        file.set_direct_refusal(EINVAL);
    } else if (aligned.failure) {
        result.failure = aligned.failure;
        return result;
    }
    const IoResult rest = write_buffered(file, offset + result.bytes, length - result.bytes, from + result.bytes);
    result.bytes += rest.bytes;
    result.failure = rest.failure;
    return result;
}

} // namespace gdrkit::engine
