// The sums file of one inode, which stores a checksum (CRC32C) for each chunk of the inode's data. The server maps
// this file into memory. The sums survive the server process. Another process on this machine can read them too
// (SumsReader).
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/descriptor.hpp"

namespace gdrkit::storage {

inline constexpr std::size_t chunk_bytes_max = 65536; // Largest size of a chunk. Each chunk has one sum.

// A chunk can be verified only if its sum is `valid`. If the server is killed during a change of a chunk, the sum stays
// `being_written`.
enum class SumState : std::uint32_t { unknown = 0, valid = 1, being_written = 2 };

// The CRC of the first `length` bytes of a chunk. If the file grew after the CRC was computed, the further bytes of the
// chunk must be zeros.
struct Sum {
    std::uint32_t crc = 0;
    std::uint32_t length = 0;
    SumState state = SumState::unknown;
};

// The modification time and size of a file after the server's last change. If fstat returns other values, another
// program has changed the file.
struct FileVersion {
    std::int64_t mtime_seconds = 0, mtime_nanoseconds = 0, size_bytes = 0;
    bool operator==(const FileVersion&) const = default;
    static FileVersion of(const struct stat& file_stat) {
        return {file_stat.st_mtim.tv_sec, file_stat.st_mtim.tv_nsec, file_stat.st_size};
    }
};

// A counter in memory that the server shares with a reader of the sums in another process. The server advances it when
// it starts, and before it stores the first sums in a new part of a sums file. A reader that has found no sums searches
// for them again when the counter has changed.
class SumsGeneration {
public:
    SumsGeneration() = default;
    SumsGeneration(const SumsGeneration&) = delete;
    SumsGeneration& operator=(const SumsGeneration&) = delete;
    ~SumsGeneration();

    // Maps the counter. `memory_fd` is a descriptor of the shared memory, which the caller still owns. If `may_advance`
    // is set, the memory must be open for writing. Returns 0 or -errno. -EINVAL means that the memory has less than a
    // page, or that other processes may shrink it.
    int open(int memory_fd, bool may_advance);
    std::uint64_t get() const noexcept { return counter_->load(std::memory_order_seq_cst); }
    void advance() noexcept {
        if (counter_ != nullptr) {
            counter_->fetch_add(1, std::memory_order_seq_cst);
        }
    }

private:
    std::atomic<std::uint64_t>* counter_ = nullptr;
};

// Returns the name of the sums file of an inode, relative to the folder of the sums: the last two hexadecimal digits of
// the inode number as a subfolder, and then all 16 digits.
std::string make_sums_name(std::uint64_t inode_number);

// The sums file, as the server reads and changes it. Sums that are stored in the shared mapping survive a SIGKILL of
// the server, and the class stores them in program order. So after a SIGKILL, the file contains all sums that were
// stored before the last write(2) of data. The caller must hold the lock of the inode. A chunk is given by its index in
// the data.
class SumsFile {
public:
    SumsFile() = default;
    SumsFile(const SumsFile&) = delete;
    SumsFile& operator=(const SumsFile&) = delete;
    ~SumsFile();

    // Opens the sums file `name` in `folder_fd`, and creates it if `create` is set. `file_fd` is a descriptor of the
    // inode's file. Discards all sums if they belong to another inode or chunk size, or if another program has changed
    // the inode's file. Afterwards version() is the version of the inode's file. `generation` must outlive this object.
    // Returns 0 or -errno.
    int open(int folder_fd, const char* name, bool create, int file_fd, std::uint32_t chunk_bytes,
             SumsGeneration& generation);
    bool is_open() const noexcept { return header_ != nullptr; }

    // Allocates memory and disk space for the sums of the chunks [first_chunk, end_chunk), so that no later store can
    // fail. Returns 0 or -errno.
    int reserve(std::uint64_t first_chunk, std::uint64_t end_chunk);

    Sum get(std::uint64_t chunk) const noexcept;
    // Sets the sum of a chunk. Does nothing if the chunk is not reserved, so that its sum stays unknown.
    void set(std::uint64_t chunk, const Sum& sum) noexcept;
    // Discards the sums of the chunks from `first_chunk` on, which are then unknown.
    void discard_from(std::uint64_t first_chunk) noexcept;

    FileVersion version() const noexcept;
    // The file may change only between begin_change() and end_change(). If the process is killed between the calls, the
    // header shows that a change was in progress.
    void begin_change() noexcept;
    void end_change(const FileVersion& version) noexcept;
    // Makes the sum of every chunk unknown, and stores `version` as the version of the file.
    void reset(const FileVersion& version) noexcept;

private:
    friend class SumsReader;
    struct Header;
    // Maps the sums file with space for this many sums. Returns 0 or -errno.
    int map(std::uint64_t chunks_count);
    void unmap() noexcept;
    // Discards the mapped sums if they do not belong to `file_fd`. Returns 0 or -errno.
    int discard_if_outdated(int file_fd, std::uint32_t chunk_bytes);

    Descriptor fd_;
    SumsGeneration* generation_ = nullptr;
    Header* header_ = nullptr;
    std::uint64_t* entries_ = nullptr; // One packed sum for each chunk.
    std::uint64_t capacity_ = 0;       // Number of mapped entries.
    std::vector<bool> has_disk_space_; // One value for each page of entries.
};

// A reader of the sums of one inode in a process other than the server. The server may change the sums at any time. The
// reader never waits for a disk, so it does not map the sums file: a page fault could wait for a disk.
class SumsReader {
public:
    // Opens the sums of the inode of `file_fd`, and may be called again. `sums_folder_fd` is a descriptor of the folder
    // with the sums files. Returns 0 or -errno: -ENOENT if the file has no sums, -ESTALE if the header of the sums file
    // is incomplete or belongs to an earlier file with this inode number, -EAGAIN if a disk must be read.
    int open(int sums_folder_fd, int file_fd);
    std::uint32_t chunk_bytes() const noexcept { return chunk_bytes_; }
    static constexpr std::size_t sums_per_read_max = 64; // Largest number of sums that one read() returns.
    // Reads the sums of the chunks from `first_chunk` on. Chunks after the end of the sums file have unknown sums.
    // Returns false if a disk must be read, or if `sums` has more than sums_per_read_max entries.
    bool read(std::uint64_t first_chunk, std::span<Sum> sums) const noexcept;

private:
    Descriptor fd_;
    std::uint32_t chunk_bytes_ = 0;
};

// Calls preadv2(2) with RWF_NOWAIT, which reads only bytes in the page cache. It makes the system call directly,
// because the function of glibc is a cancellation point, which costs some nanoseconds. Returns the number of bytes, or
// -errno.
std::int64_t read_cached(int file_fd, void* destination, std::size_t length, std::uint64_t offset) noexcept;

} // namespace gdrkit::storage
