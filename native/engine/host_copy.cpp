// Copies between a file and host memory, through the page cache or with O_DIRECT.
#include "engine/host_copy.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace gdrkit::engine {
namespace {

// Largest length of one call. The kernel would move at most 0x7ffff000 bytes.
constexpr std::uint64_t call_bytes_max = 1U << 30U;

Failure make_kernel_failure(const char* operation, int number) {
    return {.api = Api::kernel, .operation = operation, .number = number, .name = {}};
}

std::uint64_t round_down(std::uint64_t value, std::uint64_t alignment) {
    return value & ~(alignment - 1);
}

std::uint64_t round_up(std::uint64_t value, std::uint64_t alignment) {
    return round_down(value + alignment - 1, alignment);
}

// Calls `call` with the number of bytes that are already moved and the number of bytes to move next. Repeats the call
// until all bytes are moved, a call moves none, or a call fails with another error than EINTR.
template <typename Call> IoResult repeat_call(const char* operation, std::uint64_t length, const Call& call) {
    IoResult result;
    while (result.bytes < length) {
        const ssize_t moved_bytes = call(result.bytes, std::min(length - result.bytes, call_bytes_max));
        if (moved_bytes > 0) {
            result.bytes += static_cast<std::uint64_t>(moved_bytes);
        } else if (moved_bytes == 0) {
            break;
        } else if (errno != EINTR) {
            result.failure = make_kernel_failure(operation, errno);
            break;
        }
    }
    return result;
}

} // namespace

IoResult read_buffered(File& file, std::uint64_t offset, std::uint64_t length, std::byte* to) {
    const int fd = file.buffered_fd();
    return repeat_call("pread", length, [&](std::uint64_t done_bytes, std::uint64_t call_bytes) {
        return pread(fd, to + done_bytes, call_bytes, static_cast<off_t>(offset + done_bytes));
    });
}

IoResult write_buffered(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* from) {
    const int fd = file.buffered_fd();
    return repeat_call("pwrite", length, [&](std::uint64_t done_bytes, std::uint64_t call_bytes) {
        return pwrite(fd, from + done_bytes, call_bytes, static_cast<off_t>(offset + done_bytes));
    });
}

IoResult read_direct(File& file, std::uint64_t offset, std::uint64_t length, std::byte* aligned_buffer) {
    const int fd = file.direct_fd();
    const std::uint64_t offset_in_block = get_offset_in_block(file, offset);
    if (fd < 0) {
        return read_buffered(file, offset, length, aligned_buffer + offset_in_block);
    }
    const std::uint64_t alignment = file.alignment_bytes();
    const std::uint64_t aligned_offset = offset - offset_in_block;
    const std::uint64_t aligned_length = round_up(offset_in_block + length, alignment);
    IoResult result =
        repeat_call("pread", aligned_length, [&](std::uint64_t done_bytes, std::uint64_t call_bytes) -> ssize_t {
            // A read that ends inside a block has reached the end of the file, so nothing more is read with O_DIRECT.
            return (done_bytes & (alignment - 1)) != 0 ? 0
                                                       : pread(fd, aligned_buffer + done_bytes, call_bytes,
                                                               static_cast<off_t>(aligned_offset + done_bytes));
        });
    if (result.failure && result.failure->number == EINVAL && result.bytes == 0) {
        // This file system accepts O_DIRECT in open(2), but not in pread(2).
        file.disable_direct(EINVAL);
        return read_buffered(file, offset, length, aligned_buffer + offset_in_block);
    }
    result.bytes = std::min(result.bytes > offset_in_block ? result.bytes - offset_in_block : 0, length);
    result.used_direct = true;
    if (result.bytes < length && !result.failure) {
        // At the end of the file, this second read returns nothing, unless the file has grown meanwhile.
        const IoResult tail_result = read_buffered(file, offset + result.bytes, length - result.bytes,
                                                   aligned_buffer + offset_in_block + result.bytes);
        result.bytes += tail_result.bytes;
        result.failure = tail_result.failure;
    }
    return result;
}

IoResult write_direct(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* aligned_buffer) {
    const int fd = file.direct_fd();
    const std::uint64_t alignment = file.alignment_bytes();
    const std::byte* const from = aligned_buffer + get_offset_in_block(file, offset);
    const std::uint64_t head_bytes = std::min(length, round_up(offset, alignment) - offset);
    const std::uint64_t aligned_bytes = fd < 0 ? 0 : round_down(length - head_bytes, alignment);
    if (aligned_bytes == 0) {
        return write_buffered(file, offset, length, from);
    }
    IoResult result = write_buffered(file, offset, head_bytes, from);
    if (result.bytes < head_bytes) {
        return result;
    }
    // After a write that ended inside a block, the rest is written through the page cache.
    const auto write_blocks = [&](std::uint64_t done_bytes, std::uint64_t call_bytes) -> ssize_t {
        return (done_bytes & (alignment - 1)) != 0 ? 0
                                                   : pwrite(fd, from + head_bytes + done_bytes, call_bytes,
                                                            static_cast<off_t>(offset + head_bytes + done_bytes));
    };
    const IoResult aligned_result = repeat_call("pwrite", aligned_bytes, write_blocks);
    const bool refused_direct =
        aligned_result.failure && aligned_result.failure->number == EINVAL && aligned_result.bytes == 0;
    result.bytes += aligned_result.bytes;
    result.used_direct = !refused_direct;
    if (refused_direct) {
        file.disable_direct(EINVAL);
    } else if (aligned_result.failure) {
        result.failure = aligned_result.failure;
        return result;
    }
    const IoResult tail_result =
        write_buffered(file, offset + result.bytes, length - result.bytes, from + result.bytes);
    result.bytes += tail_result.bytes;
    result.failure = tail_result.failure;
    return result;
}

} // namespace gdrkit::engine
