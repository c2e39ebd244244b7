// The files of a storage server and reads that verify their checksums ("sums"). store_changes.cpp changes files.
#include "storage/store_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "storage/crc32c.hpp"
#include "storage/open_beneath.hpp"

namespace gdrkit::storage {

namespace {

// Number of chunks whose CRCs are computed at a time.
constexpr std::size_t chunks_per_batch = 64;

// Fills `destination`, or reads up to the end of the file. Returns the number of bytes, or -errno.
std::int64_t read_fully(int file_fd, std::uint64_t offset, std::span<std::byte> destination) {
    std::size_t done_bytes = 0;
    while (done_bytes < destination.size()) {
        const ssize_t read_result = pread(file_fd, destination.data() + done_bytes, destination.size() - done_bytes,
                                          static_cast<off_t>(offset + done_bytes));
        if (read_result < 0 && errno == EINTR) {
            continue;
        }
        if (read_result < 0) {
            return -errno;
        }
        if (read_result == 0) {
            break;
        }
        done_bytes += static_cast<std::size_t>(read_result);
    }
    return static_cast<std::int64_t>(done_bytes);
}

bool are_all_zero(std::span<const std::byte> bytes) {
    // The memcmp compares each byte with the next byte. If all are equal and the first is 0, all bytes are 0.
    return bytes.empty() ||
           (bytes.front() == std::byte{0} && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

} // namespace

Store::Store(int sums_folder_fd, std::uint32_t chunk_bytes, int generation_fd)
    : sums_folder_fd_(sums_folder_fd), chunk_bytes_(chunk_bytes) {
    if (chunk_bytes < 4096 || chunk_bytes > chunk_bytes_max || (chunk_bytes & (chunk_bytes - 1)) != 0) {
        throw std::system_error(EINVAL, std::generic_category(), "chunk_bytes");
    }
    if (generation_fd >= 0) {
        if (const int status = generation_.open(generation_fd, true); status != 0) {
            throw std::system_error(-status, std::generic_category(), "the counter of the sums");
        }
        generation_.advance();
    }
}

std::shared_ptr<OpenFile> Store::adopt(Descriptor fd, bool may_read, bool may_write) {
    struct stat file_stat {};
    if (fstat(fd.get(), &file_stat) != 0) {
        throw std::system_error(errno, std::generic_category(), "fstat");
    }
    if (!S_ISREG(file_stat.st_mode)) {
        throw std::system_error(S_ISDIR(file_stat.st_mode) ? EISDIR : EINVAL, std::generic_category(),
                                "open: not a regular file");
    }
    std::shared_ptr<Inode> inode;
    {
        const std::lock_guard guard(lock_);
        auto& weak_inode = inodes_[file_stat.st_ino];
        inode = weak_inode.lock();
        if (!inode) {
            inode = std::make_shared<Inode>(*this, file_stat.st_ino);
            weak_inode = inode;
        }
        std::erase_if(inodes_, [](const auto& item) { return item.second.expired(); });
    }
    {
        const std::unique_lock guard(inode->lock_);
        if (!inode->sums_.is_open() && !inode->is_unlinked_) {
            // open_sums() fails if there are no sums yet, or the store is read-only. Every sum is then unknown.
            (void)inode->open_sums(fd.get(), false);
        }
    }
    auto file = std::make_shared<OpenFile>();
    file->fd = std::move(fd);
    file->inode = std::move(inode);
    file->may_read = may_read;
    file->may_write = may_write;
    return file;
}

void Store::remove_sums(std::uint64_t inode_number) {
    std::shared_ptr<Inode> inode;
    {
        const std::lock_guard guard(lock_);
        if (const auto entry = inodes_.find(inode_number); entry != inodes_.end()) {
            inode = entry->second.lock();
        }
    }
    if (!inode) {
        inode = std::make_shared<Inode>(*this, inode_number);
    }
    inode->remove_sums();
}

int Inode::open_sums(int file_fd, bool create) {
    const std::string name = make_sums_name(inode_number_);
    if (create && mkdirat(store_.sums_folder_fd_, name.substr(0, 2).c_str(), 0700) != 0 && errno != EEXIST) {
        return -errno;
    }
    return sums_.open(store_.sums_folder_fd_, name.c_str(), create, file_fd, store_.chunk_bytes_, store_.generation_);
}

void Inode::remove_sums() {
    const std::unique_lock guard(lock_);
    is_unlinked_ = true;
    const std::string name = make_sums_name(inode_number_);
    const std::size_t slash_index = name.find('/');
    // If the subfolder does not exist, there is nothing to remove. A symbolic link in place of the subfolder is not
    // followed.
    if (const Descriptor subfolder(
            open_beneath(store_.sums_folder_fd_, name.substr(0, slash_index), O_PATH | O_DIRECTORY, 0));
        subfolder) {
        unlinkat(subfolder.get(), name.c_str() + slash_index + 1, 0);
    }
}

void Inode::discard_sums_if_changed_outside(const struct stat& file_stat) {
    const FileVersion current_version = FileVersion::of(file_stat);
    if (!(sums_.version() == current_version)) {
        sums_.reset(current_version);
        ++store_.counters_.outside_changes;
    }
}

bool Inode::matches_sum(std::uint64_t chunk, std::span<const std::byte> bytes) const {
    const Sum sum = sums_.get(chunk);
    if (sum.state != SumState::valid) {
        return true;
    }
    return sum.length <= bytes.size() && crc32c(bytes.data(), sum.length) == sum.crc &&
           are_all_zero(bytes.subspan(sum.length));
}

int Inode::report_corruption(std::uint64_t chunk) {
    ++store_.counters_.corruptions;
    std::fprintf(stderr,
                 "gdrkit serve: inode %" PRIu64 ", bytes from %" PRIu64
                 ": the data differ from those written (CRC32C)\n",
                 inode_number_, chunk * store_.chunk_bytes_);
    return -EIO;
}

Inode::ReadResult Inode::read(int file_fd, std::uint64_t offset, std::size_t length, std::span<std::byte> buffer) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::uint64_t first_chunk = offset / chunk_bytes;
    const std::size_t leading_bytes = offset % chunk_bytes; // Bytes of the first chunk before the range.
    for (bool is_second_read = false;; is_second_read = true) {
        std::uint64_t bad_chunk = 0;
        {
            const std::shared_lock guard(lock_);
            const bool has_sums = sums_.is_open();
            // A sum can be verified only with all bytes of its chunk, so whole chunks are read.
            const std::size_t bytes_to_read =
                has_sums ? (leading_bytes + length + chunk_bytes - 1) / chunk_bytes * chunk_bytes
                         : leading_bytes + length;
            const std::int64_t read_bytes = read_fully(file_fd, first_chunk * chunk_bytes, buffer.first(bytes_to_read));
            if (read_bytes < 0) {
                return {read_bytes, 0};
            }
            const auto filled_bytes = static_cast<std::size_t>(read_bytes);
            const std::size_t chunks_count = has_sums ? (filled_bytes + chunk_bytes - 1) / chunk_bytes : 0;
            const std::size_t complete_chunks_count = filled_bytes / chunk_bytes;
            std::size_t bad_index = chunks_count; // This value means that no chunk is bad.
            for (std::size_t batch_begin_index = 0; batch_begin_index < chunks_count && bad_index == chunks_count;
                 batch_begin_index += chunks_per_batch) {
                const std::size_t chunks_in_batch = std::min(chunks_per_batch, chunks_count - batch_begin_index);
                const std::size_t complete_chunks_in_batch = std::min(
                    chunks_in_batch, complete_chunks_count - std::min(batch_begin_index, complete_chunks_count));
                bool has_valid_sum = false;
                for (std::size_t index = 0; index < chunks_in_batch && !has_valid_sum; ++index) {
                    has_valid_sum = sums_.get(first_chunk + batch_begin_index + index).state == SumState::valid;
                }
                if (!has_valid_sum) {
                    continue;
                }
                std::array<std::uint32_t, chunks_per_batch> crcs;
                crc32c_chunks(buffer.data() + batch_begin_index * chunk_bytes, chunk_bytes, complete_chunks_in_batch,
                              crcs.data());
                for (std::size_t index = 0; index < chunks_in_batch && bad_index == chunks_count; ++index) {
                    const std::size_t chunk_begin = (batch_begin_index + index) * chunk_bytes;
                    const Sum sum = sums_.get(first_chunk + batch_begin_index + index);
                    // `crcs` has only the CRCs of complete chunks. If the chunk is not complete, or its sum covers
                    // fewer bytes, matches_sum() computes the CRC.
                    const bool is_crc_usable = index < complete_chunks_in_batch && sum.length == chunk_bytes;
                    if (sum.state == SumState::valid &&
                        (is_crc_usable
                             ? sum.crc != crcs[index]
                             : !matches_sum(
                                   first_chunk + batch_begin_index + index,
                                   buffer.subspan(chunk_begin, std::min(chunk_bytes, filled_bytes - chunk_begin))))) {
                        bad_index = batch_begin_index + index;
                    }
                }
            }
            if (bad_index == chunks_count) {
                return {filled_bytes <= leading_bytes
                            ? 0
                            : static_cast<std::int64_t>(std::min(length, filled_bytes - leading_bytes)),
                        leading_bytes};
            }
            bad_chunk = first_chunk + bad_index;
        }
        // If another program has changed the file, its modification time or size shows that. Otherwise the bytes are
        // corrupt, which is reported only if a second read finds a wrong sum too.
        const std::unique_lock guard(lock_);
        struct stat file_stat {};
        if (fstat(file_fd, &file_stat) != 0) {
            return {-errno, 0};
        }
        if (sums_.version() == FileVersion::of(file_stat)) {
            if (is_second_read) {
                return {report_corruption(bad_chunk), 0};
            }
        } else {
            discard_sums_if_changed_outside(file_stat);
        }
    }
}

int Inode::load_edge_chunk(int file_fd, std::uint64_t chunk, std::uint64_t file_bytes, EdgeChunk& edge_chunk) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::uint64_t chunk_begin = chunk * chunk_bytes;
    edge_chunk.length = chunk_begin >= file_bytes ? 0 : std::min<std::uint64_t>(chunk_bytes, file_bytes - chunk_begin);
    const std::span<std::byte> bytes(edge_chunk.bytes.data(), edge_chunk.length);
    const std::int64_t read_bytes = read_fully(file_fd, chunk_begin, bytes);
    if (read_bytes < 0) {
        return static_cast<int>(read_bytes);
    }
    edge_chunk.length = static_cast<std::size_t>(read_bytes);
    // The new sum will cover the unchanged bytes of the chunk, too. So this function verifies them first. Otherwise
    // corrupt bytes would get a valid sum.
    return matches_sum(chunk, bytes.first(edge_chunk.length)) ? 0 : report_corruption(chunk);
}

} // namespace gdrkit::storage
