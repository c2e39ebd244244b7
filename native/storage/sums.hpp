// The sums file of one inode: a CRC32C per chunk, in mapped memory that outlives the process.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "common/descriptor.hpp"

namespace gdrkit::storage {

enum class SumState : std::uint32_t { unknown = 0, valid = 1, being_written = 2 };

// The CRC of the first `length` bytes of a chunk. Bytes behind them, if the file has grown since, are zeros.
struct Sum {
    std::uint32_t crc = 0;
    std::uint32_t length = 0;
    SumState state = SumState::unknown;
};

// The time and size of a file after the server's last change. If fstat returns another value, another program has
// changed the file.
struct Version {
    std::int64_t seconds = 0, nanoseconds = 0, size = 0;
    bool operator==(const Version&) const = default;
    static Version of(const struct stat& file) { return {file.st_mtim.tv_sec, file.st_mtim.tv_nsec, file.st_size}; }
};

// Entries are stored in program order, which survives a SIGKILL: stores before a write(2) are present after it. The
// caller must hold the lock of the inode.
class SumsFile {
public:
    SumsFile() = default;
    SumsFile(const SumsFile&) = delete;
    SumsFile& operator=(const SumsFile&) = delete;
    ~SumsFile();

    // Opens (or with `create`, creates) the file `name` in `folder` for the file behind `file`. Returns 0 or -errno.
    // The contents of another inode or chunk size are discarded. Afterwards, version() is that of the file, or reset()
    // was called because another program had changed it.
    int open(int folder, const char* name, bool create, int file, std::uint32_t chunk_bytes);
    bool is_open() const noexcept { return header_ != nullptr; }

    // Allocates space for the sums of chunks below `chunks`, on disk too, so that no later store can fail. Returns 0 or
    // -errno.
    int reserve(std::uint64_t first, std::uint64_t chunks);

    Sum get(std::uint64_t chunk) const noexcept;
    // Sets the sum of a reserved chunk. Other chunks are unknown and are ignored.
    void set(std::uint64_t chunk, const Sum& sum) noexcept;
    // Discards the sums of the chunks from `first` on, which are then unknown.
    void discard_from(std::uint64_t first) noexcept;

    Version version() const noexcept;
    // Between these two calls the file may change. A kill in between is visible in the header.
    void begin_change() noexcept;
    void end_change(const Version& version) noexcept;
    // Makes every chunk unknown.
    void reset(const Version& version) noexcept;

private:
    struct Header;
    int map(std::uint64_t chunks);
    void unmap() noexcept;
    int adopt(int file, std::uint32_t chunk_bytes);

    Descriptor fd_;
    Header* header_ = nullptr;
    std::uint64_t* entries_ = nullptr;
    std::uint64_t capacity_ = 0; // Number of mapped entries.
    std::vector<bool> backed_;   // Pages of entries that have space on disk.
};

} // namespace gdrkit::storage
