// Reads from the page cache (RWF_NOWAIT) and the check of their checksums.
#include "usrbio/agent/local_file.hpp"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

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
// a multiple of every chunk size.
constexpr std::size_t piece_bytes_max = 128 * 1024;
constexpr std::size_t chunk_bytes_min = 4096;

// Calls preadv2(2). The function of glibc is a cancellation point, which costs some nanoseconds.
ssize_t read_cached(int file, const iovec& part, std::uint64_t offset) {
    static_assert(sizeof(long) == 8, "the offset must fit into one argument");
    return syscall(SYS_preadv2, file, &part, 1L, offset, 0L, RWF_NOWAIT);
}

bool is_zero(std::span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
}

} // namespace

LocalStore::LocalStore(Descriptor sums) : sums_folder(std::move(sums)) {
    if (const int status = generation.open(sums_folder.get(), false); status != 0)
        throw std::system_error(-status, std::generic_category(), "the counter of the checksums cannot be read");
}

// Maps the sums again if the server may have added some. Returns whether the sums are known.
bool LocalFile::update_sums() {
    const std::uint64_t generation = store_->generation.get();
    if (sums_state_ == Sums::unknown || generation != generation_) {
        generation_ = generation;
        const int status = sums_.open(store_->sums_folder.get(), file_.get());
        sums_state_ = status == 0 ? Sums::open : status == -ENOENT ? Sums::none : Sums::unusable;
    }
    return sums_state_ != Sums::unusable;
}

// Returns whether a chunk has its checksum. `bytes` are all bytes of the chunk, and `crc` is the CRC of all of them.
bool LocalFile::matches_sum(std::uint64_t chunk, std::span<const std::byte> bytes, std::uint32_t crc) const {
    const Sum sum = sums_.get(chunk);
    if (sum.state != SumState::valid)
        return sum.state == SumState::unknown;
    if (sum.length == bytes.size())
        return sum.crc == crc;
    return sum.length < bytes.size() && storage::crc32c(bytes.data(), sum.length) == sum.crc &&
           is_zero(bytes.subspan(sum.length));
}

// Returns whether the bytes have the checksums of their chunks. At most piece_bytes_max bytes. `is_end`: the file ends
// after the bytes. A chunk of which only a part was read must have no checksum.
bool LocalFile::match_sums(std::uint64_t offset, std::span<const std::byte> bytes, bool is_end) const {
    const std::size_t chunk_bytes = sums_.chunk_bytes();
    const auto has_sum = [&](std::uint64_t chunk) { return sums_.get(chunk).state != SumState::unknown; };
    std::uint64_t chunk = offset / chunk_bytes;
    if (offset % chunk_bytes != 0 && !bytes.empty()) {
        if (has_sum(chunk++))
            return false;
        bytes = bytes.subspan(std::min<std::size_t>(bytes.size(), chunk * chunk_bytes - offset));
    }
    std::array<std::uint32_t, piece_bytes_max / chunk_bytes_min> crcs;
    const std::size_t count = bytes.size() / chunk_bytes;
    storage::crc32c_chunks(bytes.data(), chunk_bytes, count, crcs.data());
    for (std::size_t index = 0; index < count; ++index)
        if (!matches_sum(chunk + index, bytes.subspan(index * chunk_bytes, chunk_bytes), crcs[index]))
            return false;
    const std::span<const std::byte> rest = bytes.subspan(count * chunk_bytes);
    if (rest.empty() || !has_sum(chunk + count))
        return true;
    return is_end && matches_sum(chunk + count, rest, storage::crc32c(rest.data(), rest.size()));
}

std::optional<std::int64_t> LocalFile::read(std::uint64_t offset, std::span<std::byte> destination) {
    if (is_refused_ || !update_sums())
        return std::nullopt;
    const bool has_sums = sums_state_ == Sums::open;
    // A chunk that is only partly in the range cannot be verified. If it has a sum, do not read in vain.
    if (has_sums && offset % sums_.chunk_bytes() != 0 &&
        sums_.get(offset / sums_.chunk_bytes()).state != SumState::unknown)
        return std::nullopt;
    std::size_t done = 0, verified = 0;
    bool is_end = false;
    while (verified < destination.size() && !is_end) {
        std::size_t piece_end = destination.size();
        if (has_sums) // Each piece but the first begins at a chunk.
            piece_end =
                std::min<std::size_t>(piece_end, verified + piece_bytes_max - (offset + verified) % piece_bytes_max);
        while (done < piece_end && !is_end) {
            const iovec part{destination.data() + done, piece_end - done};
            const ssize_t count = read_cached(file_.get(), part, offset + done);
            if (count < 0 && errno == EINTR)
                continue;
            if (count < 0) {
                is_refused_ = errno == EOPNOTSUPP || errno == ENOSYS;
                return std::nullopt;
            }
            done += static_cast<std::size_t>(count);
            is_end = count == 0;
        }
        if (has_sums && !match_sums(offset + verified, destination.subspan(verified, done - verified), is_end))
            return std::nullopt;
        verified = done;
    }
    return static_cast<std::int64_t>(done);
}

} // namespace gdrkit::usrbio::agent
