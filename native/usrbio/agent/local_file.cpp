// Completes the reads that the agent serves from the page cache, and verifies the checksums of the bytes.
#include "usrbio/agent/local_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "storage/crc32c.hpp"

namespace gdrkit::usrbio::agent {
namespace {

using storage::Sum;
using storage::SumState;

constexpr std::size_t chunk_bytes_min = 4096; // Smallest size of a chunk, the range of bytes that has one checksum.
// A piece may consist of whole chunks and a part of one more chunk at each end.
static_assert(local_piece_bytes_max / chunk_bytes_min + 2 <= storage::SumsReader::sums_per_read_max);

bool is_zero(std::span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
}

// Returns whether the bytes of a chunk match its checksum. A chunk whose checksum is unknown matches. `bytes` are all
// bytes of the chunk, and `crc` is their CRC.
bool chunk_matches_sum(const Sum& sum, std::span<const std::byte> bytes, std::uint32_t crc) {
    if (sum.state != SumState::valid)
        return sum.state == SumState::unknown;
    if (sum.length == bytes.size())
        return sum.crc == crc;
    return sum.length < bytes.size() && storage::crc32c(bytes.data(), sum.length) == sum.crc &&
           is_zero(bytes.subspan(sum.length));
}

} // namespace

LocalStore::LocalStore(Descriptor folder, Descriptor generation_memory) : sums_folder(std::move(folder)) {
    if (const int status = generation.open(generation_memory.get(), false); status != 0)
        throw std::system_error(-status, std::generic_category(), "the counter of new checksums cannot be mapped");
}

LocalFile::LocalFile(Descriptor file, std::shared_ptr<LocalStore> store)
    : file_(std::move(file)), store_(std::move(store)) {
    const std::string path = "/proc/self/fd/" + std::to_string(file_.get());
    // O_NONBLOCK: open() does not wait for the owner of a file lease. The second try is without O_NOATIME, which the
    // kernel may refuse.
    for (const int extra_flag : {O_NOATIME, 0})
        if (!helper_file_)
            helper_file_ = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | extra_flag));
    ++store_->files_count;
    update_sums();
}

// Opens the checksum file again if the server may have created it since the last call, or if it was unusable. The
// second case may succeed now, because the server has executed the last read: it loaded the sums into the page cache,
// and discarded sums of an earlier file with the same inode number. Returns false if the file is still unusable.
bool LocalFile::update_sums() {
    const std::uint64_t generation = store_->generation.get();
    if (generation != generation_ || sums_state_ == SumsState::unusable) {
        generation_ = generation;
        const int status = sums_.open(store_->sums_folder.get(), file_.get());
        sums_state_ = status == 0 ? SumsState::open : status == -ENOENT ? SumsState::none : SumsState::unusable;
    }
    return sums_state_ != SumsState::unusable;
}

// Returns whether the bytes, at most local_piece_bytes_max, match the checksums of their chunks. Returns false if a
// checksum covers more bytes than were read. The sums are read after the bytes: if a write of the server has changed
// the bytes, the sum of their chunk is new too, or says that the chunk is being written.
bool LocalFile::piece_matches_sums(std::uint64_t offset, std::span<const std::byte> bytes) const noexcept {
    if (bytes.empty())
        return true;
    const std::size_t chunk_bytes = sums_.chunk_bytes();
    std::array<Sum, storage::SumsReader::sums_per_read_max> sums;
    const std::uint64_t first_chunk = offset / chunk_bytes;
    if (!sums_.read(first_chunk, {sums.data(), (offset + bytes.size() - 1) / chunk_bytes - first_chunk + 1}))
        return false;
    const Sum* next_sum = sums.data();
    if (offset % chunk_bytes != 0) { // The bytes begin inside a chunk, which can match only if it has no sum.
        if (next_sum++->state != SumState::unknown)
            return false;
        bytes = bytes.subspan(std::min<std::size_t>(bytes.size(), chunk_bytes - offset % chunk_bytes));
    }
    std::array<std::uint32_t, local_piece_bytes_max / chunk_bytes_min> chunk_crcs;
    const std::size_t chunk_count = bytes.size() / chunk_bytes;
    storage::crc32c_chunks(bytes.data(), chunk_bytes, chunk_count, chunk_crcs.data());
    for (std::size_t index = 0; index < chunk_count; ++index)
        if (!chunk_matches_sum(*next_sum++, bytes.subspan(index * chunk_bytes, chunk_bytes), chunk_crcs[index]))
            return false;
    const std::span<const std::byte> partial_chunk = bytes.subspan(chunk_count * chunk_bytes);
    return partial_chunk.empty() ||
           chunk_matches_sum(*next_sum, partial_chunk, storage::crc32c(partial_chunk.data(), partial_chunk.size()));
}

// Returns whether the first `length` bytes of a chunk may suffice to verify it.
bool LocalFile::can_verify_chunk(std::uint64_t chunk_index, std::size_t length) const noexcept {
    Sum sum;
    return sums_.read(chunk_index, {&sum, 1}) &&
           (sum.state == SumState::unknown || (sum.state == SumState::valid && sum.length <= length));
}

std::int64_t LocalFile::complete_piece(std::uint64_t offset, std::span<std::byte> destination,
                                       std::int64_t first_result) const noexcept {
    std::size_t copied_bytes = 0;
    bool is_at_end = false;
    std::int64_t read_result = first_result; // A number of bytes, or a negative errno.
    // A short read may end at a page that is not in the page cache. Only a read of 0 bytes can be the end of the file.
    // Linux 5.9 and 5.10 also return 0 for a page that is not cached, so fstat() then decides.
    for (;;) {
        if (read_result < 0) {
            if (read_result == -EOPNOTSUPP || read_result == -ENOSYS)
                is_nowait_unsupported_.store(true, std::memory_order_relaxed);
            return ~static_cast<std::int64_t>(copied_bytes);
        }
        copied_bytes += static_cast<std::size_t>(read_result);
        is_at_end = read_result == 0;
        if (copied_bytes == destination.size() || is_at_end)
            break;
        read_result = storage::read_cached(file_.get(), destination.data() + copied_bytes,
                                           destination.size() - copied_bytes, offset + copied_bytes);
    }
    const auto result = static_cast<std::int64_t>(copied_bytes);
    struct stat attributes {};
    if (is_at_end && (fstat(file_.get(), &attributes) != 0 ||
                      static_cast<std::uint64_t>(attributes.st_size) > offset + copied_bytes))
        return ~result;
    // Even if the state was `open` when this read was prepared, it may be `unusable` now, because prepare_read() of a
    // later read of the batch changed it.
    return sums_state_ == SumsState::none ||
                   (sums_state_ == SumsState::open && piece_matches_sums(offset, destination.first(copied_bytes)))
               ? result
               : ~result;
}

bool LocalFile::prepare_read(std::uint64_t offset, std::size_t length) {
    if (is_nowait_unsupported_.load(std::memory_order_relaxed) || !update_sums() || length > local_read_bytes_max)
        return false;
    if (sums_state_ != SumsState::open)
        return true;
    // The first and the last chunk may be only partly in the range. Such a chunk can be verified only if its sum is
    // unknown, or covers only bytes of the range. Otherwise the server has to execute the read, and a local copy of its
    // bytes would be useless.
    const std::uint64_t chunk_bytes = sums_.chunk_bytes(), end = offset + length;
    return (offset % chunk_bytes == 0 || can_verify_chunk(offset / chunk_bytes, 0)) &&
           (end % chunk_bytes == 0 || can_verify_chunk(end / chunk_bytes, end % chunk_bytes));
}

} // namespace gdrkit::usrbio::agent
