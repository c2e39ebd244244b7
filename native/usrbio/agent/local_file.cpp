// Reads from the page cache (RWF_NOWAIT) and the check of their checksums.
#include "usrbio/agent/local_file.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "storage/crc32c.hpp"

namespace gdrkit::usrbio::agent {
namespace {

using storage::Sum;
using storage::SumState;

// Bytes that are read before their checksums are computed, so that they are still in the cache of the processor. It is
// a multiple of every chunk size. Each piece of a read but the first begins at a multiple of it in the file.
constexpr std::size_t piece_bytes_max = 128 * 1024;
constexpr std::size_t chunk_bytes_min = 4096;
constexpr std::size_t pieces_max = local_read_bytes_max / piece_bytes_max + 1;
// The chunks of a piece, and a part of one chunk more at each end.
static_assert(piece_bytes_max / chunk_bytes_min + 2 <= storage::SumsReader::sums_per_read_max);

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
    ++store_->files_count;
    update_sums();
}

// Searches the sums again if the server may have created some, or if they were not usable: the server has executed the
// last read, and then they are in the page cache and belong to the file. Returns whether the sums are known.
bool LocalFile::update_sums() {
    const std::uint64_t generation = store_->generation.get();
    if (generation != generation_ || sums_state_ == Sums::unusable) {
        generation_ = generation;
        const int status = sums_.open(store_->sums_folder.get(), file_.get());
        sums_state_ = status == 0 ? Sums::open : status == -ENOENT ? Sums::none : Sums::unusable;
    }
    return sums_state_ != Sums::unusable;
}

// Returns whether the bytes have the checksums of their chunks. At most piece_bytes_max bytes. If a checksum covers
// more bytes than were read, the result is false. The sums are read after the bytes: if a write of the server has
// changed the bytes, the sum of their chunk is new too, or says that the chunk is being written.
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
    std::array<std::uint32_t, piece_bytes_max / chunk_bytes_min> crcs;
    const std::size_t count = bytes.size() / chunk_bytes;
    storage::crc32c_chunks(bytes.data(), chunk_bytes, count, crcs.data());
    for (std::size_t index = 0; index < count; ++index)
        if (!matches_sum(*sum++, bytes.subspan(index * chunk_bytes, chunk_bytes), crcs[index]))
            return false;
    const std::span<const std::byte> rest = bytes.subspan(count * chunk_bytes);
    return rest.empty() || matches_sum(*sum, rest, storage::crc32c(rest.data(), rest.size()));
}

// Returns whether the first `length` bytes of a chunk may suffice to verify it.
bool LocalFile::may_match_sum(std::uint64_t chunk, std::size_t length) const noexcept {
    Sum sum;
    return sums_.read(chunk, {&sum, 1}) &&
           (sum.state == SumState::unknown || (sum.state == SumState::valid && sum.length <= length));
}

// Reads and verifies one piece. Returns the number of bytes. If the storage server has to execute the read, returns the
// bitwise complement of the number of bytes that were copied, which is negative.
std::int64_t LocalFile::read_piece(std::uint64_t offset, std::span<std::byte> destination) const noexcept {
    std::size_t done = 0;
    bool is_end = false;
    // A short read may end at a page that is not in the page cache. Only 0 bytes mean the end of the file.
    while (done < destination.size() && !is_end) {
        const std::int64_t count =
            storage::read_cached(file_.get(), destination.data() + done, destination.size() - done, offset + done);
        if (count < 0) {
            if (count == -EOPNOTSUPP || count == -ENOSYS)
                is_refused_.store(true, std::memory_order_relaxed);
            return ~static_cast<std::int64_t>(done);
        }
        done += static_cast<std::size_t>(count);
        is_end = count == 0;
    }
    const auto result = static_cast<std::int64_t>(done);
    return sums_state_ == Sums::open && !match_sums(offset, destination.first(done)) ? ~result : result;
}

std::optional<std::int64_t> LocalFile::read(std::uint64_t offset, std::span<std::byte> destination, ReadHelper& helper,
                                            std::uint64_t& copied_bytes) {
    if (is_refused_.load(std::memory_order_relaxed) || !update_sums() || destination.size() > local_read_bytes_max)
        return std::nullopt;
    // A chunk that is only partly in the range cannot be verified. If it has a sum, do not read in vain.
    if (sums_state_ == Sums::open) {
        const std::uint64_t chunk_bytes = sums_.chunk_bytes(), end = offset + destination.size();
        if ((offset % chunk_bytes != 0 && !may_match_sum(offset / chunk_bytes, 0)) ||
            (end % chunk_bytes != 0 && !may_match_sum(end / chunk_bytes, end % chunk_bytes)))
            return std::nullopt;
    }
    const std::uint64_t first_piece = offset / piece_bytes_max;
    const auto piece_of = [&](std::size_t index) {
        const std::uint64_t begin = std::max(offset, (first_piece + index) * piece_bytes_max);
        const std::uint64_t end = std::min(offset + destination.size(), (first_piece + index + 1) * piece_bytes_max);
        return std::pair(begin, destination.subspan(begin - offset, end - begin));
    };
    const std::size_t pieces_count = (offset + destination.size() - 1) / piece_bytes_max - first_piece + 1;
    if (pieces_count == 1) {
        const std::int64_t result = read_piece(offset, destination);
        copied_bytes += static_cast<std::uint64_t>(result < 0 ? ~result : result);
        return result < 0 ? std::nullopt : std::optional(result);
    }
    std::array<std::int64_t, pieces_max> results{};
    std::atomic<bool> has_failed{false};
    helper.run(pieces_count, [&](std::size_t index) {
        if (has_failed.load(std::memory_order_relaxed))
            return;
        const auto [begin, piece] = piece_of(index);
        results[index] = read_piece(begin, piece);
        if (results[index] < 0)
            has_failed.store(true, std::memory_order_relaxed);
    });
    for (const std::int64_t result : results)
        copied_bytes += static_cast<std::uint64_t>(result < 0 ? ~result : result);
    if (has_failed.load(std::memory_order_relaxed))
        return std::nullopt;
    std::int64_t done = 0;
    for (std::size_t index = 0; index < pieces_count; ++index) {
        // The file ended before this piece. If the piece has bytes all the same, the file grew meanwhile.
        if (done != static_cast<std::int64_t>(piece_of(index).first - offset) && results[index] != 0)
            return std::nullopt;
        done += results[index];
    }
    return done;
}

} // namespace gdrkit::usrbio::agent
