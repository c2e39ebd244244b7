// The part of a storage server's Inode that changes files: writes, truncation, holes and times. Each change also
// updates the checksums ("sums") of the changed chunks.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <vector>

#include "storage/crc32c.hpp"
#include "storage/store_file.hpp"

namespace gdrkit::storage {

int Inode::write_all(int file_fd, std::uint64_t offset, std::span<const std::byte> data,
                     std::size_t& written_bytes) const {
    written_bytes = 0;
    while (written_bytes < data.size()) {
        const ssize_t write_result = pwrite(file_fd, data.data() + written_bytes, data.size() - written_bytes,
                                            static_cast<off_t>(offset + written_bytes));
        if (write_result < 0 && errno == EINTR) {
            continue;
        }
        if (write_result <= 0) {
            return write_result == 0 ? -ENOSPC : -errno;
        }
        written_bytes += static_cast<std::size_t>(write_result);
    }
    return 0;
}

void Inode::set_modification_time_to_now(int file_fd) {
    // The kernel's clock for file times ticks every few milliseconds. If another program changed the file in the same
    // tick, the time would stay the same, and the server would not detect the change. So the server sets the time
    // itself, with a finer clock. If the server does not own the file, futimens may fail, and the kernel's time
    // remains.
    timespec times[] = {{0, UTIME_OMIT}, {}};
    if (clock_gettime(CLOCK_REALTIME, &times[1]) == 0) {
        (void)futimens(file_fd, times);
    }
}

void Inode::finish_change(int file_fd) {
    struct stat file_stat {};
    // If fstat fails, the stored version is wrong, so the next access discards all sums.
    sums_.end_change(fstat(file_fd, &file_stat) == 0 ? FileVersion::of(file_stat) : FileVersion{});
}

std::int64_t Inode::write(int file_fd, std::uint64_t offset, std::span<const std::byte> data) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::unique_lock guard(lock_);
    if (!sums_.is_open() && !is_unlinked_) {
        if (const int status = open_sums(file_fd, true); status != 0) {
            return status;
        }
    }
    std::size_t written_bytes = 0;
    if (!sums_.is_open()) { // The file has no name any more, so it gets no sums.
        const int status = write_all(file_fd, offset, data, written_bytes);
        return status != 0 ? status : static_cast<std::int64_t>(data.size());
    }
    struct stat stat_before {};
    if (fstat(file_fd, &stat_before) != 0) {
        return -errno;
    }
    discard_sums_if_changed_outside(stat_before);
    const auto file_bytes = static_cast<std::uint64_t>(stat_before.st_size);
    const std::uint64_t end = offset + data.size(), first_chunk = offset / chunk_bytes,
                        last_chunk = (end - 1) / chunk_bytes;
    const auto chunks_count = static_cast<std::size_t>(last_chunk - first_chunk + 1);
    if (const int status = sums_.reserve(first_chunk, last_chunk + 1); status != 0) {
        return status;
    }
    thread_local std::vector<Sum> old_sums, new_sums;
    thread_local std::vector<std::uint32_t> crcs; // CRCs of the chunks that are written completely.
    thread_local EdgeChunk edge_chunk;
    old_sums.resize(chunks_count);
    new_sums.resize(chunks_count);
    crcs.resize(chunks_count);
    const auto first_complete_chunk = (offset + chunk_bytes - 1) / chunk_bytes;
    const auto complete_chunks_end = std::max(end / chunk_bytes, first_complete_chunk);
    crc32c_chunks(data.data() + (first_complete_chunk * chunk_bytes - offset), chunk_bytes,
                  complete_chunks_end - first_complete_chunk, crcs.data());
    for (std::size_t index = 0; index < chunks_count; ++index) {
        const std::uint64_t chunk = first_chunk + index, chunk_begin = chunk * chunk_bytes;
        old_sums[index] = sums_.get(chunk);
        if (chunk >= first_complete_chunk && chunk < complete_chunks_end) {
            new_sums[index] = {crcs[chunk - first_complete_chunk], static_cast<std::uint32_t>(chunk_bytes),
                               SumState::valid};
            continue;
        }
        const std::uint64_t change_begin = std::max(offset, chunk_begin),
                            change_end = std::min<std::uint64_t>(end, chunk_begin + chunk_bytes);
        if (const int status = load_edge_chunk(file_fd, chunk, file_bytes, edge_chunk); status != 0) {
            return status;
        }
        const auto change_begin_in_chunk = static_cast<std::size_t>(change_begin - chunk_begin),
                   change_end_in_chunk = static_cast<std::size_t>(change_end - chunk_begin);
        // If the write begins after the end of the file, the bytes between are zeros.
        if (edge_chunk.length < change_begin_in_chunk) {
            std::memset(edge_chunk.bytes.data() + edge_chunk.length, 0, change_begin_in_chunk - edge_chunk.length);
        }
        std::memcpy(edge_chunk.bytes.data() + change_begin_in_chunk, data.data() + (change_begin - offset),
                    change_end_in_chunk - change_begin_in_chunk);
        const std::size_t length = std::max(edge_chunk.length, change_end_in_chunk);
        new_sums[index] = {crc32c(edge_chunk.bytes.data(), length), static_cast<std::uint32_t>(length),
                           SumState::valid};
    }
    // All new sums are known now. The chunks have no valid sums during the write, so that no sum is wrong if the server
    // is killed meanwhile.
    sums_.begin_change();
    for (std::size_t index = 0; index < chunks_count; ++index) {
        sums_.set(first_chunk + index, {0, 0, SumState::being_written});
    }
    const int status = write_all(file_fd, offset, data, written_bytes);
    // If the write failed, the chunks before the failure get their new sums. The chunk that is partly written gets
    // no valid sum, and the chunks after it get their old sums.
    for (std::size_t index = 0; index < chunks_count; ++index) {
        const std::uint64_t chunk_begin = (first_chunk + index) * chunk_bytes;
        const bool is_complete = status == 0 || chunk_begin + chunk_bytes <= offset + written_bytes;
        const bool is_partly_written = written_bytes != 0 && chunk_begin < offset + written_bytes;
        sums_.set(first_chunk + index, is_complete ? new_sums[index] : is_partly_written ? Sum{} : old_sums[index]);
    }
    set_modification_time_to_now(file_fd);
    finish_change(file_fd);
    return status != 0 ? status : static_cast<std::int64_t>(data.size());
}

int Inode::set_times(int file_fd, std::optional<std::int64_t> access_ns, std::optional<std::int64_t> modification_ns) {
    const auto to_timespec = [](std::optional<std::int64_t> time_ns) {
        constexpr std::int64_t ns_per_second = 1'000'000'000;
        if (!time_ns) {
            return timespec{0, UTIME_OMIT};
        }
        // tv_nsec must not be negative, also for times before 1970.
        const std::int64_t nanoseconds = (*time_ns % ns_per_second + ns_per_second) % ns_per_second;
        return timespec{(*time_ns - nanoseconds) / ns_per_second, nanoseconds};
    };
    const timespec times[] = {to_timespec(access_ns), to_timespec(modification_ns)};
    const std::unique_lock guard(lock_);
    struct stat stat_before {};
    if (sums_.is_open()) {
        if (fstat(file_fd, &stat_before) != 0) {
            return -errno;
        }
        discard_sums_if_changed_outside(stat_before);
        sums_.begin_change();
    }
    const int status = futimens(file_fd, times) != 0 ? -errno : 0;
    if (sums_.is_open()) {
        finish_change(file_fd);
    }
    return status;
}

int Inode::truncate(int file_fd, std::uint64_t new_file_bytes) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::unique_lock guard(lock_);
    if (!sums_.is_open()) {
        return ftruncate(file_fd, static_cast<off_t>(new_file_bytes)) != 0 ? -errno : 0;
    }
    struct stat stat_before {};
    if (fstat(file_fd, &stat_before) != 0) {
        return -errno;
    }
    discard_sums_if_changed_outside(stat_before);
    // The tail chunk is the chunk in which the file will end, and tail_bytes is the number of its bytes before the end.
    const std::uint64_t tail_chunk = new_file_bytes / chunk_bytes;
    const std::size_t tail_bytes = new_file_bytes % chunk_bytes;
    const bool is_shrinking = new_file_bytes < static_cast<std::uint64_t>(stat_before.st_size);
    const Sum old_sum = sums_.get(tail_chunk);
    Sum new_sum = old_sum;
    thread_local EdgeChunk edge_chunk;
    if (is_shrinking && tail_bytes != 0 && old_sum.state == SumState::valid) {
        // The file will end inside the tail chunk, so the new sum of this chunk covers only the bytes that remain.
        const auto old_file_bytes = static_cast<std::uint64_t>(stat_before.st_size);
        if (const int status = load_edge_chunk(file_fd, tail_chunk, old_file_bytes, edge_chunk); status != 0) {
            return status;
        }
        new_sum = {crc32c(edge_chunk.bytes.data(), tail_bytes), static_cast<std::uint32_t>(tail_bytes),
                   SumState::valid};
        if (const int status = sums_.reserve(tail_chunk, tail_chunk + 1); status != 0) {
            return status;
        }
    }
    sums_.begin_change();
    if (is_shrinking) {
        sums_.discard_from(tail_chunk + (tail_bytes != 0 ? 1 : 0));
        if (tail_bytes != 0 && old_sum.state == SumState::valid) {
            sums_.set(tail_chunk, {0, 0, SumState::being_written});
        }
    }
    const int status = ftruncate(file_fd, static_cast<off_t>(new_file_bytes)) != 0 ? -errno : 0;
    if (is_shrinking && tail_bytes != 0 && old_sum.state == SumState::valid) {
        sums_.set(tail_chunk, status == 0 ? new_sum : old_sum);
    }
    set_modification_time_to_now(file_fd);
    finish_change(file_fd);
    return status;
}

int Inode::punch(int file_fd, std::uint64_t begin, std::uint64_t end) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::unique_lock guard(lock_);
    struct stat stat_before {};
    if (fstat(file_fd, &stat_before) != 0) {
        return -errno;
    }
    const auto file_bytes = static_cast<std::uint64_t>(stat_before.st_size);
    end = std::min(end, file_bytes);
    if (begin >= end) {
        return 0;
    }
    const auto punch_range = [&] {
        return fallocate(file_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                         static_cast<off_t>(end - begin)) != 0
                   ? -errno
                   : 0;
    };
    if (!sums_.is_open()) {
        return punch_range();
    }
    discard_sums_if_changed_outside(stat_before);
    const std::uint64_t first_chunk = begin / chunk_bytes, last_chunk = (end - 1) / chunk_bytes;
    thread_local EdgeChunk edge_chunk;
    std::array<Sum, 2> edge_sums; // New sums of the first and of the last chunk.
    for (const std::uint64_t chunk : {first_chunk, last_chunk}) {
        Sum& sum = edge_sums[chunk == first_chunk ? 0 : 1];
        const std::uint64_t chunk_begin = chunk * chunk_bytes;
        if (sums_.get(chunk).state != SumState::valid) {
            continue;
        }
        if (const int status = load_edge_chunk(file_fd, chunk, file_bytes, edge_chunk); status != 0) {
            return status;
        }
        const auto hole_begin_in_chunk = static_cast<std::size_t>(std::max(begin, chunk_begin) - chunk_begin);
        const auto hole_end_in_chunk =
            static_cast<std::size_t>(std::min<std::uint64_t>(end, chunk_begin + chunk_bytes) - chunk_begin);
        std::memset(edge_chunk.bytes.data() + hole_begin_in_chunk, 0, hole_end_in_chunk - hole_begin_in_chunk);
        sum = {crc32c(edge_chunk.bytes.data(), edge_chunk.length), static_cast<std::uint32_t>(edge_chunk.length),
               SumState::valid};
    }
    sums_.begin_change();
    for (std::uint64_t chunk = first_chunk; chunk <= last_chunk; ++chunk) {
        if (sums_.get(chunk).state != SumState::unknown) {
            sums_.set(chunk, {0, 0, SumState::being_written});
        }
    }
    const int status = punch_range();
    for (std::uint64_t chunk = first_chunk; chunk <= last_chunk; ++chunk) {
        if (sums_.get(chunk).state != SumState::unknown) {
            // Only the first and the last chunk get new sums. The sums of the chunks between them become unknown. If
            // fallocate failed, all sums become unknown, because it may have punched a part of the range.
            const bool is_edge = chunk == first_chunk || chunk == last_chunk;
            sums_.set(chunk, status == 0 && is_edge ? edge_sums[chunk == first_chunk ? 0 : 1] : Sum{});
        }
    }
    set_modification_time_to_now(file_fd);
    finish_change(file_fd);
    return status;
}

} // namespace gdrkit::storage
