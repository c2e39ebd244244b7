// LocalReader executes a batch of reads of the page cache in one or two threads. It divides the reads into pieces, and
// forms groups of pieces. A thread takes one group at a time.
#include "usrbio/agent/local_reader.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>

#include "storage/sums.hpp"

namespace gdrkit::usrbio::agent {
namespace {

// Smallest size of a group of pieces, except of the last group. A thread takes a whole group at once: a handover
// between the threads takes some tenths of a microsecond, and a system call for several reads takes less time than one
// for each.
constexpr std::uint64_t group_bytes_min = 32 * 1024;
// The helper takes a part of each batch of at least this size. For fewer bytes, the handovers cost more than they save.
constexpr std::uint64_t shared_bytes_min = 128 * 1024;

std::int64_t read_by_system_call(const CachedRead& read) noexcept {
    return storage::read_cached(read.fd, read.destination.data(), read.destination.size(), read.offset);
}

// Executes reads by io_uring. Returns false if io_uring cannot be used.
bool read_by_io_uring(ReadRing& ring, std::span<CachedRead> reads) noexcept {
    if (!ring.read(reads))
        return false;
    const auto is_refused = [](const CachedRead& read) { return read.result == -EAGAIN; };
    // In older kernels, io_uring refuses RWF_NOWAIT for files on some block devices even if the bytes are cached. If
    // the system call reads the bytes that io_uring refused, this is such a kernel.
    if (std::ranges::all_of(reads, is_refused) && read_by_system_call(reads.front()) >= 0) {
        ring.close();
        return false;
    }
    return true;
}

} // namespace

bool LocalReader::add(LocalFile& file, std::uint64_t offset, std::span<std::byte> destination) {
    if (destination.empty() || !file.prepare_read(offset, destination.size()))
        return false;
    requested_bytes_ += destination.size();
    const std::size_t first_piece_index = pieces_.size();
    while (!destination.empty()) {
        const auto piece_destination =
            destination.first(std::min(destination.size(), local_piece_bytes_max - offset % local_piece_bytes_max));
        pieces_.push_back({&file, reads_.size(), 0});
        cached_reads_.push_back({-1, offset, piece_destination, 0}); // read_pieces() sets the descriptor.
        if (group_ends_.empty() || last_group_bytes_ >= group_bytes_min) {
            group_ends_.push_back(0);
            last_group_bytes_ = 0;
        }
        group_ends_.back() = pieces_.size();
        last_group_bytes_ += piece_destination.size();
        offset += piece_destination.size();
        destination = destination.subspan(piece_destination.size());
    }
    reads_.push_back({first_piece_index, pieces_.size() - first_piece_index, false});
    return true;
}

// Returns the flag `has_failed` of the read to which the piece belongs. Both threads access the flag.
std::atomic_ref<bool> LocalReader::failure_flag(std::size_t piece_index) noexcept {
    return std::atomic_ref(reads_[pieces_[piece_index].read_index].has_failed);
}

std::uint64_t LocalReader::run(int application_processor) {
    if (requested_bytes_ < shared_bytes_min) {
        read_pieces(0, pieces_.size(), false);
    } else {
        // An application reads into the same memory again and again, in ascending or descending order. In both cases
        // this thread reads into the lower addresses and the helper into the higher ones, so that most of this memory
        // stays in the cache of one processor.
        const std::size_t group_count = group_ends_.size();
        const bool is_descending = cached_reads_.front().destination.data() > cached_reads_.back().destination.data();
        const auto read_group = [&](std::size_t index, bool is_helper) {
            const std::size_t group_index = is_descending ? group_count - 1 - index : index;
            read_pieces(group_index == 0 ? 0 : group_ends_[group_index - 1], group_ends_[group_index], is_helper);
        };
        helper_.run(group_count, application_processor, std::ref(read_group)); // std::ref avoids an allocation.
    }
    std::uint64_t copied_bytes = 0;
    for (const Piece& piece : pieces_) // A negative result is the bitwise complement of the number of copied bytes.
        copied_bytes += static_cast<std::uint64_t>(piece.result < 0 ? ~piece.result : piece.result);
    return copied_bytes;
}

void LocalReader::read_pieces(std::size_t begin, std::size_t end, bool is_helper) {
    // A group of one piece usually is a part of a long read. If another piece of this read has failed, the piece is not
    // needed.
    if (end - begin == 1 && failure_flag(begin).load(std::memory_order_relaxed))
        return;
    for (std::size_t call_end = begin; call_end < end; begin = call_end) {
        call_end = std::min(end, begin + ReadRing::reads_max);
        const std::span reads = std::span(cached_reads_).subspan(begin, call_end - begin);
        for (std::size_t index = begin; index < call_end; ++index)
            cached_reads_[index].fd = is_helper ? pieces_[index].file->helper_fd() : pieces_[index].file->fd();
        // For a single read, io_uring takes longer than the system call of read_cached().
        if (reads.size() == 1 || !read_by_io_uring(read_rings_[is_helper ? 1 : 0], reads))
            for (CachedRead& read : reads)
                read.result = read_by_system_call(read);
        for (std::size_t index = begin; index < call_end; ++index)
            complete_piece(index);
    }
}

void LocalReader::complete_piece(std::size_t index) {
    const CachedRead& read = cached_reads_[index];
    Piece& piece = pieces_[index];
    piece.result = piece.file->complete_piece(read.offset, read.destination, read.result);
    if (piece.result < 0)
        failure_flag(index).store(true, std::memory_order_relaxed);
}

std::optional<std::int64_t> LocalReader::result(std::size_t index) const noexcept {
    const Read& read = reads_[index];
    if (read.has_failed)
        return std::nullopt;
    std::uint64_t read_bytes = 0;
    bool has_file_ended = false;
    for (std::size_t piece_index = read.first_piece_index; piece_index < read.first_piece_index + read.pieces_count;
         ++piece_index) {
        const std::int64_t piece_bytes = pieces_[piece_index].result;
        // If the file had ended before this piece, but the piece has bytes, the file grew meanwhile.
        if (has_file_ended && piece_bytes != 0)
            return std::nullopt;
        read_bytes += static_cast<std::uint64_t>(piece_bytes);
        has_file_ended = piece_bytes != static_cast<std::int64_t>(cached_reads_[piece_index].destination.size());
    }
    // The helper may have found the end of the file, then the file grew, and then this thread read the earlier pieces.
    // So compare the end of the read with the size of the file again.
    struct stat attributes {};
    if (has_file_ended && read.pieces_count > 1 &&
        (fstat(pieces_[read.first_piece_index].file->fd(), &attributes) != 0 ||
         static_cast<std::uint64_t>(attributes.st_size) > cached_reads_[read.first_piece_index].offset + read_bytes))
        return std::nullopt;
    return static_cast<std::int64_t>(read_bytes);
}

void LocalReader::clear() noexcept {
    reads_.clear();
    pieces_.clear();
    cached_reads_.clear();
    group_ends_.clear();
    requested_bytes_ = last_group_bytes_ = 0;
}

} // namespace gdrkit::usrbio::agent
