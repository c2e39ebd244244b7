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
    // `folder`: the folder of the checksum files. `generation_memory`: shared memory with the counter that the server
    // advances when it stores new sums; see storage::SumsGeneration. Throws std::system_error if the memory cannot be
    // mapped.
    LocalStore(Descriptor folder, Descriptor generation_memory);

    Descriptor sums_folder;
    storage::SumsGeneration generation;
    std::atomic<std::size_t> files_count{0}; // Number of LocalFile objects.
    // Largest number of LocalFile objects: each needs up to three descriptors. The storage server executes all reads of
    // further files.
    std::size_t files_max = 0;
};

// Largest number of bytes of a local read. The limit exists because the other rings wait while the loop reads.
inline constexpr std::size_t local_read_bytes_max = std::size_t{4} * 1024 * 1024;
// A read is divided into pieces of at most this many bytes. Each piece is verified before the next piece is read, while
// its bytes are still in the cache of the processor. The number is a multiple of every chunk size. Each piece except
// the first of a read begins at a file offset that is a multiple of this number.
inline constexpr std::size_t local_piece_bytes_max = 128 * 1024;

// A file of the store.
class LocalFile {
public:
    // `file` must be open for reading. Opens the file a second time and opens its checksums, which may read a disk.
    LocalFile(Descriptor file, std::shared_ptr<LocalStore> store);
    ~LocalFile() { --store_->files_count; }
    LocalFile(const LocalFile&) = delete;
    LocalFile& operator=(const LocalFile&) = delete;

    // Returns whether a read of 1 to local_read_bytes_max bytes may be local. Otherwise the storage server has to
    // execute it: a checksum covers bytes that are not requested, or the checksums are not known. Only one thread at a
    // time may call this function, and no thread may call complete_piece() meanwhile.
    bool prepare_read(std::uint64_t offset, std::size_t length);

    // Completes one piece of a prepared read, at most local_piece_bytes_max bytes: reads the missing bytes, and
    // verifies the checksums. `first_result`: the result of storage::read_cached() for the piece. Returns the number of
    // bytes, which is less than requested at the end of the file. The storage server has to execute the read if a disk
    // must be read, a checksum does not match, or `destination` is no longer mapped. In these cases, returns the
    // bitwise complement of the number of copied bytes, which is negative.
    std::int64_t complete_piece(std::uint64_t offset, std::span<std::byte> destination,
                                std::int64_t first_result) const noexcept;

    // One descriptor is for the thread of the loop, the other for its helper. If both threads used one open file, reads
    // would take a sixth longer, because both threads would write to the kernel's object of that open file.
    int fd() const noexcept { return file_.get(); }
    int helper_fd() const noexcept { return helper_file_ ? helper_file_.get() : file_.get(); }

private:
    bool update_sums();
    bool can_verify_chunk(std::uint64_t chunk_index, std::size_t length) const noexcept;
    bool piece_matches_sums(std::uint64_t offset, std::span<const std::byte> bytes) const noexcept;

    Descriptor file_, helper_file_;
    std::shared_ptr<LocalStore> store_;
    storage::SumsReader sums_;
    std::uint64_t generation_ = 0;
    // `none`: the file has no checksums. `unusable`: sums_.open() failed, so it is not known which checksums the file
    // has.
    enum class SumsState : std::uint8_t { none, open, unusable } sums_state_ = SumsState::unusable;
    mutable std::atomic<bool> is_nowait_unsupported_{false}; // The file system does not support RWF_NOWAIT.
};

} // namespace gdrkit::usrbio::agent
