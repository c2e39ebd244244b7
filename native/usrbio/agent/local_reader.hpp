// Reads of the page cache for files whose storage server runs on this machine. The agent's loop collects reads in a
// batch and executes them, and a second thread takes a part of a large batch.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "usrbio/agent/local_file.hpp"
#include "usrbio/agent/read_helper.hpp"
#include "usrbio/agent/read_ring.hpp"

namespace gdrkit::usrbio::agent {

class LocalReader {
public:
    // Adds a read to the batch. Returns false if the storage server has to execute the read. The caller must guard
    // `destination` by a BusGuard, because the client may truncate this memory. The client may also change the bytes at
    // any time. `file` must exist until clear().
    bool add(LocalFile& file, std::uint64_t offset, std::span<std::byte> destination);
    // Returns the number of bytes that the reads of the batch request.
    std::uint64_t requested_bytes() const noexcept { return requested_bytes_; }

    // Executes the reads of the batch. Returns the number of bytes that were copied, also for reads without a result.
    // `application_processor`: see ReadHelper.
    std::uint64_t run(int application_processor);
    // Returns the number of bytes of a read, which is less than requested at the end of the file. Returns nothing if
    // the storage server has to execute the read: a disk must be read, a checksum does not match, or the destination is
    // no longer mapped. The destination may then contain any bytes. `index`: the number of reads that were added to the
    // batch before this read.
    std::optional<std::int64_t> result(std::size_t index) const noexcept;
    // Removes all reads from the batch.
    void clear() noexcept;

private:
    struct Read {
        std::size_t first_piece_index = 0;
        std::size_t pieces_count = 0;
        bool has_failed = false;
    };
    // A part of a read, of at most local_piece_bytes_max bytes.
    struct Piece {
        const LocalFile* file = nullptr;
        std::size_t read_index = 0; // Index into reads_.
        std::int64_t result = 0;    // The result of LocalFile::complete_piece().
    };

    // Reads the pieces with the indices from `begin` to `end` - 1.
    void read_pieces(std::size_t begin, std::size_t end, bool is_helper);
    void complete_piece(std::size_t index);
    std::atomic_ref<bool> failure_flag(std::size_t piece_index) noexcept;

    ReadHelper helper_;
    std::array<ReadRing, 2> read_rings_; // For the thread of the loop, and for the helper.
    std::vector<Read> reads_;
    std::vector<Piece> pieces_;
    std::vector<CachedRead> cached_reads_; // One for each piece.
    // A group is a range of pieces that one thread reads together. For each group: the index after its last piece.
    std::vector<std::size_t> group_ends_;
    std::uint64_t requested_bytes_ = 0;
    std::uint64_t last_group_bytes_ = 0;
};

} // namespace gdrkit::usrbio::agent
