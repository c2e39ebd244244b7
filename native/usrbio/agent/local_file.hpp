// Reads of files of the agent's own machine, which the loop executes without the storage server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "common/descriptor.hpp"
#include "storage/sums.hpp"

namespace gdrkit::usrbio::agent {

// The checksums of a store whose storage server runs on this machine.
struct LocalStore {
    // Throws std::system_error if the server of this store has not created its counter, or the agent cannot read it.
    explicit LocalStore(Descriptor sums);

    Descriptor sums_folder;
    storage::SumsGeneration generation;
};

// A file of the store. Only one thread at a time may call its functions.
class LocalFile {
public:
    // `file` is open for reading.
    LocalFile(Descriptor file, std::shared_ptr<LocalStore> store) : file_(std::move(file)), store_(std::move(store)) {}

    // Reads bytes that are in the page cache, and verifies their checksums. Returns the number of bytes, which is less
    // than requested at the end of the file. Returns nothing if the storage server has to execute the read: a disk must
    // be read, a checksum does not match or covers bytes that are not requested, or the memory is gone. `destination`
    // may then contain any bytes. A fault in it must not end the process; see BusGuard.
    std::optional<std::int64_t> read(std::uint64_t offset, std::span<std::byte> destination);

private:
    bool update_sums();
    bool matches_sum(std::uint64_t chunk, std::span<const std::byte> bytes, std::uint32_t crc) const;
    bool match_sums(std::uint64_t offset, std::span<const std::byte> bytes, bool is_end) const;

    Descriptor file_;
    std::shared_ptr<LocalStore> store_;
    storage::SumsReader sums_;
    std::uint64_t generation_ = 0;
    enum class Sums : std::uint8_t { unknown, none, open, unusable } sums_state_ = Sums::unknown;
    bool is_refused_ = false; // The file system cannot read from the page cache alone.
};

} // namespace gdrkit::usrbio::agent
