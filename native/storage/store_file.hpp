// The files of a storage server and the checksums of their chunks, called sums. Reads verify the sums, and writes
// update them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>

#include "storage/sums.hpp"

namespace gdrkit::storage {

// Totals of a server since its start. `outside_changes` counts the changes of files by other programs.
struct Counters {
    std::atomic<std::uint64_t> reads{0}, writes{0}, read_bytes{0}, written_bytes{0}, corruptions{0}, outside_changes{0},
        rdma_errors{0}, refused_frames{0}, sessions{0};
};

class Store;

// An inode with open files. All OpenFile objects of the inode share this object. The parameter `file_fd` of the methods
// is a descriptor of the inode's file, and `chunk` is the index of a chunk in this file. A method that returns int
// returns 0 or -errno.
class Inode {
public:
    Inode(Store& store, std::uint64_t inode_number) : store_(store), inode_number_(inode_number) {}

    struct ReadResult {
        // Number of bytes, which is less than requested at the end of the file, or -errno. -EIO means that the bytes
        // differ from the written bytes.
        std::int64_t bytes_or_error;
        std::size_t buffer_offset; // Position of the first requested byte in the buffer.
    };
    // Reads all chunks that the range overlaps, and verifies their sums. The buffer must have space for `length` bytes
    // and two more chunks.
    ReadResult read(int file_fd, std::uint64_t offset, std::size_t length, std::span<std::byte> buffer);
    // Writes all bytes and returns their count, or returns -errno.
    std::int64_t write(int file_fd, std::uint64_t offset, std::span<const std::byte> data);
    int truncate(int file_fd, std::uint64_t new_file_bytes);
    // Punches a hole of the bytes [begin, end), at most up to the end of the file.
    int punch(int file_fd, std::uint64_t begin, std::uint64_t end);
    // Sets the times with futimens(3). The sums stay valid.
    int set_times(int file_fd, std::optional<std::int64_t> access_ns, std::optional<std::int64_t> modification_ns);
    // Removes the sums file after the last name of the file was removed.
    void remove_sums();

private:
    friend class Store;
    // The bytes of the first or last chunk of a change, if only a part of the chunk changes.
    struct EdgeChunk {
        std::size_t length = 0; // Length of the chunk before the change, in bytes.
        std::array<std::byte, chunk_bytes_max> bytes;
    };

    int open_sums(int file_fd, bool create);
    void discard_sums_if_changed_outside(const struct stat& file_stat);
    // Returns whether the bytes of a chunk match its sum. Returns true also if the chunk has no valid sum.
    bool matches_sum(std::uint64_t chunk, std::span<const std::byte> bytes) const;
    // Reads a chunk of a file of `file_bytes` bytes and verifies its sum.
    int load_edge_chunk(int file_fd, std::uint64_t chunk, std::uint64_t file_bytes, EdgeChunk& edge_chunk);
    // Writes all bytes of `data`. Sets `written_bytes`, also if a write fails.
    int write_all(int file_fd, std::uint64_t offset, std::span<const std::byte> data, std::size_t& written_bytes) const;
    static void set_modification_time_to_now(int file_fd);
    // Ends the change in the sums file, and stores the new version of the file there.
    void finish_change(int file_fd);
    // Counts and logs a corrupt chunk. Returns -EIO.
    int report_corruption(std::uint64_t chunk);

    Store& store_;
    const std::uint64_t inode_number_;
    std::shared_mutex lock_; // Shared for reads of the file, exclusive for changes.
    SumsFile sums_;
    bool is_unlinked_ = false; // The last name of the file was removed, so no sums file may be created.
};

// A file that a session has opened.
struct OpenFile {
    Descriptor fd;
    std::shared_ptr<Inode> inode;
    bool may_read = false, may_write = false;
};

// The inodes with open files, and the descriptor of the folder with their sums. All sessions of a server share this
// object.
class Store {
public:
    // The caller owns the descriptors. `chunk_bytes` is a power of two from 4096 to 65536. `generation_fd` is the
    // descriptor of the memory for SumsGeneration, or -1 if no other process reads the sums. Throws std::system_error.
    Store(int sums_folder_fd, std::uint32_t chunk_bytes, int generation_fd = -1);

    // Makes an OpenFile of an open descriptor. `may_read` and `may_write` are the rights of the client. Throws
    // std::system_error.
    std::shared_ptr<OpenFile> adopt(Descriptor fd, bool may_read, bool may_write);
    // Removes the sums of a file whose last name was removed.
    void remove_sums(std::uint64_t inode_number);

    std::uint32_t chunk_bytes() const noexcept { return chunk_bytes_; }
    Counters& counters() noexcept { return counters_; }

private:
    friend class Inode;
    const int sums_folder_fd_;
    const std::uint32_t chunk_bytes_;
    SumsGeneration generation_;
    Counters counters_;
    std::mutex lock_;                                      // Protects inodes_.
    std::map<std::uint64_t, std::weak_ptr<Inode>> inodes_; // By inode number.
};

} // namespace gdrkit::storage
