// Reads of files of the agent's own machine, which the loop executes without the storage server.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "common/descriptor.hpp"
#include "storage/sums.hpp"
#include "usrbio/agent/read_helper.hpp"

namespace gdrkit::usrbio::agent {

// The checksums of a store whose storage server runs on this machine.
struct LocalStore {
    // `generation`: the memory of the server's counter (storage::SumsGeneration). Throws std::system_error.
    LocalStore(Descriptor sums, Descriptor generation);

    Descriptor sums_folder;
    storage::SumsGeneration generation;
    std::atomic<std::size_t> files_count{0};
    std::size_t files_max = 0; // The loop makes no more files, because each needs up to two descriptors.
};

// Largest number of bytes of a local read. The other rings wait meanwhile.
inline constexpr std::size_t local_read_bytes_max = std::size_t{4} * 1024 * 1024;

// A file of the store.
class LocalFile {
public:
    // `file` is open for reading. Looks for the checksums of the file, which may read a disk.
    LocalFile(Descriptor file, std::shared_ptr<LocalStore> store);
    ~LocalFile() { --store_->files_count; }
    LocalFile(const LocalFile&) = delete;
    LocalFile& operator=(const LocalFile&) = delete;

    // Reads bytes that are in the page cache, and verifies their checksums. Returns the number of bytes, which is less
    // than requested at the end of the file. Returns nothing if the storage server has to execute the read: a disk must
    // be read, a checksum does not match or covers bytes that are not requested, or the memory is gone. `destination`
    // may then contain any bytes. A fault in it must not end the process; see BusGuard. The client may change it
    // meanwhile. `destination` has at most local_read_bytes_max bytes. Adds the number of bytes that were copied to
    // `copied_bytes`, also if the result is nothing. Only one thread at a time may call this function.
    std::optional<std::int64_t> read(std::uint64_t offset, std::span<std::byte> destination, ReadHelper& helper,
                                     std::uint64_t& copied_bytes);

private:
    bool update_sums();
    bool may_match_sum(std::uint64_t chunk, std::size_t length) const noexcept;
    std::int64_t read_piece(std::uint64_t offset, std::span<std::byte> destination) const noexcept;
    bool match_sums(std::uint64_t offset, std::span<const std::byte> bytes) const noexcept;

    Descriptor file_;
    std::shared_ptr<LocalStore> store_;
    storage::SumsReader sums_;
    std::uint64_t generation_ = 0;
    enum class Sums : std::uint8_t { none, open, unusable } sums_state_ = Sums::unusable;
    mutable std::atomic<bool> is_refused_{false}; // The file system cannot read from the page cache alone.
};

} // namespace gdrkit::usrbio::agent
