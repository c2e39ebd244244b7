// The sums file of one inode: a CRC32C for each chunk, in memory that outlives the process.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "storage/descriptor.hpp"

namespace gdrkit::storage {

enum class SumState : std::uint32_t { unknown = 0, valid = 1, being_written = 2 };

// The sum of a chunk's first `length` bytes. Later bytes, if the file has grown since, are zeros.
struct Sum {
    std::uint32_t crc = 0;
    std::uint32_t length = 0;
    SumState state = SumState::unknown;
};

// When and how large a file was after the server's last change; another answer of fstat says that somebody else
// changed it.
struct Version {
    std::int64_t seconds = 0, nanoseconds = 0, size = 0;
    bool operator==(const Version&) const = default;
    static Version of(const struct stat& file) { return {file.st_mtim.tv_sec, file.st_mtim.tv_nsec, file.st_size}; }
};

// Entries are stored with the order of the program, which a SIGKILL keeps: what was stored before a write(2) is there
// after it. Whoever uses it holds the lock of the inode.
class SumsFile {
public:
    SumsFile() = default;
    SumsFile(const SumsFile&) = delete;
    SumsFile& operator=(const SumsFile&) = delete;
    ~SumsFile();

    // Opens (or, with `create`, makes) the file `name` in `folder` for the file behind `file`. Returns 0 or -errno;
    // what another inode or chunk size left there begins anew. Afterwards version() is that of the file, or reset() was
    // called because somebody else had changed it.
    int open(int folder, const char* name, bool create, int file, std::uint32_t chunk_bytes);
    bool is_open() const noexcept { return header_ != nullptr; }

    // Have room for the sums of chunks below `chunks`, on disk too: no later store can fail. 0 or -errno.
    int reserve(std::uint64_t first, std::uint64_t chunks);

    Sum get(std::uint64_t chunk) const noexcept;
    // Only for chunks that were reserved; other chunks are unknown already.
    void set(std::uint64_t chunk, const Sum& sum) noexcept;
    // All from this chunk on are unknown.
    void forget(std::uint64_t first) noexcept;

    Version version() const noexcept;
    // Between these two the file may change, and a kill leaves that on record.
    void begin_change() noexcept;
    void end_change(const Version& version) noexcept;
    // Every chunk is unknown from now on.
    void reset(const Version& version) noexcept;

private:
    struct Header;
    int map(std::uint64_t chunks);
    void unmap() noexcept;
    int adopt(int file, std::uint32_t chunk_bytes);

    Descriptor fd_;
    Header* header_ = nullptr;
    std::uint64_t* entries_ = nullptr;
    std::uint64_t capacity_ = 0; // Entries that are mapped.
    std::vector<bool> backed_;   // Pages of entries that have room on disk.
};

} // namespace gdrkit::storage
