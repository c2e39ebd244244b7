// The completion of reads from the page cache, and the check of their checksums.
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

constexpr std::size_t chunk_bytes_min = 4096;
// The chunks of a piece, and a part of one chunk more at each end.
static_assert(local_piece_bytes_max / chunk_bytes_min + 2 <= storage::SumsReader::sums_per_read_max);

bool is_zero(std::span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
}

// Returns whether a chunk has its checksum. `bytes` are all bytes of the chunk, and `crc` is the CRC of all of them.
bool matches_sum(const Sum& sum, std::span<const std::byte> bytes, std::uint32_t crc) {
    if (sum.state != SumState::valid)
        return sum.state == SumState::unknown;
    if (sum.length == bytes.size())
        return sum.crc == crc;
    return sum.length < bytes.size() && storage::crc32c(bytes.data(), sum.length) == sum.crc &&
           is_zero(bytes.subspan(sum.length));
}

} // namespace

LocalStore::LocalStore(Descriptor sums, Descriptor generation_memory) : sums_folder(std::move(sums)) {
    if (const int status = generation.open(generation_memory.get(), false); status != 0)
        throw std::system_error(-status, std::generic_category(), "the counter of the checksums cannot be read");
}

LocalFile::LocalFile(Descriptor file, std::shared_ptr<LocalStore> store)
    : file_(std::move(file)), store_(std::move(store)) {
    const std::string name = "/proc/self/fd/" + std::to_string(file_.get());
    // O_NONBLOCK: do not wait for the owner of a lease. The agent may not be allowed to use O_NOATIME.
    for (const int flags : {O_NOATIME, 0})
        if (!helper_file_)
            helper_file_ = Descriptor(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags));
    ++store_->files_count;
    update_sums();
}

// Searches the sums again if the server may have created some, or if they were not usable: the server has executed the
// last read, and then they are in the page cache and belong to the file. Returns whether the sums are known.
bool LocalFile::update_sums() {
    const std::uint64_t generation = store_->generation.get();
    if (generation != generation_ || sums_state_ == SumsState::unusable) {
        generation_ = generation;
        const int status = sums_.open(store_->sums_folder.get(), file_.get());
        sums_state_ = status == 0 ? SumsState::open : status == -ENOENT ? SumsState::none : SumsState::unusable;
    }
    return sums_state_ != SumsState::unusable;
}

// Returns whether the bytes have the checksums of their chunks. At most local_piece_bytes_max bytes. If a checksum
// covers more bytes than were read, the result is false. The sums are read after the bytes: if a write of the server
// has changed the bytes, the sum of their chunk is new too, or says that the chunk is being written.
bool LocalFile::match_sums(std::uint64_t offset, std::span<const std::byte> bytes) const noexcept {
    if (bytes.empty())
        return true;
    const std::size_t chunk_bytes = sums_.chunk_bytes();
    std::array<Sum, storage::SumsReader::sums_per_read_max> sums;
    const std::uint64_t first = offset / chunk_bytes;
    if (!sums_.read(first, {sums.data(), (offset + bytes.size() - 1) / chunk_bytes - first + 1}))
        return false;
    const Sum* sum = sums.data();
    if (offset % chunk_bytes != 0) {
        if (sum++->state != SumState::unknown)
            return false;
        bytes = bytes.subspan(std::min<std::size_t>(bytes.size(), chunk_bytes - offset % chunk_bytes));
    }
    std::array<std::uint32_t, local_piece_bytes_max / chunk_bytes_min> crcs;
    const std::size_t count = bytes.size() / chunk_bytes;
    storage::crc32c_chunks(bytes.data(), chunk_bytes, count, crcs.data());
    for (std::size_t index = 0; index < count; ++index)
        if (!matches_sum(*sum++, bytes.subspan(index * chunk_bytes, chunk_bytes), crcs[index]))
            return false;
    const std::span<const std::byte> rest = bytes.subspan(count * chunk_bytes);
    return rest.empty() || matches_sum(*sum, rest, storage::crc32c(rest.data(), rest.size()));
}

// Returns whether the first `length` bytes of a chunk may suffice to verify it.
bool LocalFile::can_verify_chunk(std::uint64_t chunk, std::size_t length) const noexcept {
    Sum sum;
    return sums_.read(chunk, {&sum, 1}) &&
           (sum.state == SumState::unknown || (sum.state == SumState::valid && sum.length <= length));
}

std::int64_t LocalFile::complete_piece(std::uint64_t offset, std::span<std::byte> destination,
                                       std::int64_t first_count) const noexcept {
    std::size_t done = 0;
    bool is_end = false;
    std::int64_t count = first_count;
    // A short read may end at a page that is not in the page cache. Only 0 bytes mean the end of the file, and in Linux
    // 5.9 and 5.10 not even these.
    for (;;) {
        if (count < 0) {
            if (count == -EOPNOTSUPP || count == -ENOSYS)
                is_nowait_unsupported_.store(true, std::memory_order_relaxed);
            return ~static_cast<std::int64_t>(done);
        }
        done += static_cast<std::size_t>(count);
        is_end = count == 0;
        if (done == destination.size() || is_end)
            break;
        count = storage::read_cached(file_.get(), destination.data() + done, destination.size() - done, offset + done);
    }
    const auto result = static_cast<std::int64_t>(done);
    struct stat status {};
    if (is_end && (fstat(file_.get(), &status) != 0 || static_cast<std::uint64_t>(status.st_size) > offset + done))
        return ~result;
    // A later read of the batch may have found that the sums are not usable any more, so this is not sums_state_ ==
    // open.
    return sums_state_ == SumsState::none ||
                   (sums_state_ == SumsState::open && match_sums(offset, destination.first(done)))
               ? result
               : ~result;
}

bool LocalFile::prepare_read(std::uint64_t offset, std::size_t length) {
    if (is_nowait_unsupported_.load(std::memory_order_relaxed) || !update_sums() || length > local_read_bytes_max)
        return false;
    if (sums_state_ != SumsState::open)
        return true;
    // A chunk that is only partly in the range cannot be verified. If it has a sum, do not read in vain.
    const std::uint64_t chunk_bytes = sums_.chunk_bytes(), end = offset + length;
    return (offset % chunk_bytes == 0 || can_verify_chunk(offset / chunk_bytes, 0)) &&
           (end % chunk_bytes == 0 || can_verify_chunk(end / chunk_bytes, end % chunk_bytes));
}

} // namespace gdrkit::usrbio::agent
