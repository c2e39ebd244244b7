// Reads of cached bytes of the agent's own machine, which the loop executes in batches, with a second thread if they
// are long.
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
    // Adds a read to the batch. Returns false if the storage server has to execute the read. A fault in `destination`
    // must not end the process; see BusGuard. The client may change the bytes at any time. The file must exist until
    // clear().
    bool add(LocalFile& file, std::uint64_t offset, std::span<std::byte> destination);
    // Returns the size of the reads of the batch.
    std::uint64_t requested_bytes() const noexcept { return requested_bytes_; }

    // Executes the reads of the batch. Returns the number of bytes that were copied, also for reads without a result.
    // `application_processor`: see ReadHelper.
    std::uint64_t run(int application_processor);
    // Returns the number of bytes of a read, which is less than requested at the end of the file. Returns nothing if
    // the storage server has to execute the read: a disk must be read, a checksum does not match, or the memory is
    // gone. Its destination may then contain any bytes. `index`: the number of reads that were added before it.
    std::optional<std::int64_t> result(std::size_t index) const noexcept;
    // Removes all reads from the batch.
    void clear() noexcept;

private:
    struct Read {
        std::size_t first_piece = 0;
        std::size_t pieces_count = 0;
        bool has_failed = false;
    };
    struct Piece {
        const LocalFile* file = nullptr;
        std::size_t read = 0; // Index into reads_.
        std::int64_t result = 0;
    };

    void read_pieces(std::size_t begin, std::size_t end, bool is_helper);
    void complete_piece(std::size_t index);
    std::atomic_ref<bool> has_failed(std::size_t piece) noexcept;

    ReadHelper helper_;
    std::array<ReadRing, 2> rings_; // For the thread of the loop, and for the helper.
    std::vector<Read> reads_;
    std::vector<Piece> pieces_;
    std::vector<CachedRead> cached_reads_; // One for each piece.
    // For each group of pieces, which one thread reads together, the index of the piece after its last.
    std::vector<std::size_t> group_ends_;
    std::uint64_t requested_bytes_ = 0;
    std::uint64_t last_group_bytes_ = 0;
};

} // namespace gdrkit::usrbio::agent
