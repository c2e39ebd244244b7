// A file whose cached bytes the agent's loop reads itself, because the storage server of the file runs on the same
// machine. local_reader.hpp executes the reads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/descriptor.hpp"
#include "storage/sums.hpp"

namespace gdrkit::usrbio::agent {

// The checksums of a store whose storage server runs on this machine.
struct LocalStore {
    // `sums`: the folder of the checksum files. `generation_memory`: the shared memory of the server's counter; see
    // storage::SumsGeneration. Throws std::system_error if the memory cannot be mapped.
    LocalStore(Descriptor sums, Descriptor generation_memory);

    Descriptor sums_folder;
    storage::SumsGeneration generation;
    std::atomic<std::size_t> files_count{0}; // Number of LocalFile objects.
    // Largest number of LocalFile objects: each needs up to three descriptors. The storage server executes all reads of
    // further files.
    std::size_t files_max = 0;
};

// Largest number of bytes of a local read. The other rings wait while the loop reads.
inline constexpr std::size_t local_read_bytes_max = std::size_t{4} * 1024 * 1024;
// Bytes that are read before their checksums are computed, so that they are still in the cache of the processor. It is
// a multiple of every chunk size. Each piece of a read but the first begins at a multiple of it in the file.
inline constexpr std::size_t local_piece_bytes_max = 128 * 1024;

// A file of the store.
class LocalFile {
public:
    // `file` is open for reading. Opens it again, and looks for its checksums, which may read a disk.
    LocalFile(Descriptor file, std::shared_ptr<LocalStore> store);
    ~LocalFile() { --store_->files_count; }
    LocalFile(const LocalFile&) = delete;
    LocalFile& operator=(const LocalFile&) = delete;

    // Returns whether a read of 1 to local_read_bytes_max bytes may be local. Otherwise the storage server has to
    // execute it: a checksum covers bytes that are not requested, or the checksums are not known. Only one thread at a
    // time may call this function, and no thread may call complete_piece() meanwhile.
    bool prepare_read(std::uint64_t offset, std::size_t length);

    // Completes the read of a piece of a prepared read, of at most local_piece_bytes_max bytes: reads bytes that are
    // missing, and verifies the checksums. `first_count`: the result of storage::read_cached() for the piece. Returns
    // the number of bytes, which is less than requested at the end of the file. If the storage server has to execute
    // the read, returns the bitwise complement of the number of bytes that were copied, which is negative: a disk must
    // be read, a checksum does not match, or the memory is gone.
    std::int64_t complete_piece(std::uint64_t offset, std::span<std::byte> destination,
                                std::int64_t first_count) const noexcept;

    // A descriptor for the thread of the loop, and one for its helper. Reads by two threads through one open file take
    // a sixth longer, because both write to it.
    int fd() const noexcept { return file_.get(); }
    int helper_fd() const noexcept { return helper_file_ ? helper_file_.get() : file_.get(); }

private:
    bool update_sums();
    bool can_verify_chunk(std::uint64_t chunk, std::size_t length) const noexcept;
    bool match_sums(std::uint64_t offset, std::span<const std::byte> bytes) const noexcept;

    Descriptor file_, helper_file_;
    std::shared_ptr<LocalStore> store_;
    storage::SumsReader sums_;
    std::uint64_t generation_ = 0;
    enum class SumsState : std::uint8_t { none, open, unusable } sums_state_ = SumsState::unusable;
    mutable std::atomic<bool> is_nowait_unsupported_{false}; // The file system cannot read from the page cache alone.
};

} // namespace gdrkit::usrbio::agent
