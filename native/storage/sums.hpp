// The sums file of one inode, which stores a CRC32C per chunk of its file. It is mapped into memory, so that the sums
// survive the process.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "common/descriptor.hpp"

namespace gdrkit::storage {

enum class SumState : std::uint32_t { unknown = 0, valid = 1, being_written = 2 };

// The CRC of the first `length` bytes of a chunk. If the file has grown since, the bytes after them must be zeros.
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

// The class stores its entries in program order. So after a SIGKILL, the file contains all stores before the last
// write(2). The caller must hold the lock of the inode.
class SumsFile {
public:
    SumsFile() = default;
    SumsFile(const SumsFile&) = delete;
    SumsFile& operator=(const SumsFile&) = delete;
    ~SumsFile();

    // Opens the sums file `name` in `folder`, and creates it if `create` is set. `file` is a descriptor of the inode's
    // file. Returns 0 or -errno. If the sums belong to another inode or chunk size, or another program has changed the
    // file, all sums are discarded. Afterwards version() is the version of the file.
    int open(int folder, const char* name, bool create, int file, std::uint32_t chunk_bytes);
    bool is_open() const noexcept { return header_ != nullptr; }

    // Allocates memory and disk space for the sums of the chunks [first, end), so that no later store can fail. Returns
    // 0 or -errno.
    int reserve(std::uint64_t first, std::uint64_t end);

    Sum get(std::uint64_t chunk) const noexcept;
    // Sets the sum of a chunk. Does nothing if the chunk is not reserved; its sum stays unknown.
    void set(std::uint64_t chunk, const Sum& sum) noexcept;
    // Discards the sums of the chunks from `first` on, which are then unknown.
    void discard_from(std::uint64_t first) noexcept;

    Version version() const noexcept;
    // The file may change only between these two calls. If the process is killed in this time, the header shows it.
    void begin_change() noexcept;
    void end_change(const Version& version) noexcept;
    // Makes the sum of every chunk unknown.
    void reset(const Version& version) noexcept;

private:
    struct Header;
    // Maps the sums file with space for this many sums. Returns 0 or -errno.
    int map(std::uint64_t chunks_count);
    void unmap() noexcept;
    // Discards the mapped sums if they do not belong to `file`. Returns 0 or -errno.
    int discard_if_foreign(int file, std::uint32_t chunk_bytes);

    Descriptor fd_;
    Header* header_ = nullptr;
    std::uint64_t* entries_ = nullptr;
    std::uint64_t capacity_ = 0;       // Number of mapped entries.
    std::vector<bool> has_disk_space_; // For each page of entries.
};

} // namespace gdrkit::storage
