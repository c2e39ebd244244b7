// A reference for path_bench.cpp, which measures the I/O path (ring, agent, server and NIC): only the copies that the
// path makes, in two threads.
//
// One thread reads chunks of the file into staging memory and computes their CRC32C, as the storage server does. The
// other thread, on another processor, copies the chunks to their destination, as the NIC does. Unlike the path, this
// code has no rings, no frames, no memory keys and no wake-ups. It is not the fastest way to copy: other chunk sizes,
// or two threads that each do all steps, may be faster.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "storage/crc32c.hpp"
#include "uring_reads.hpp"

namespace gdrkit::usrbio::bench {

inline void pin_thread(pthread_t thread, int processor) {
    cpu_set_t processors;
    CPU_ZERO(&processors);
    CPU_SET(processor, &processors);
    if (const int error = pthread_setaffinity_np(thread, sizeof processors, &processors); error != 0) {
        errno = error;
        exit_with_errno("pthread_setaffinity_np");
    }
}

class BareCopies {
public:
    // Each operation copies `operation_bytes` bytes of the file into one of `depth` buffers, which are used in turn.
    // The reading thread runs on the first of the processors, the copying thread on the last.
    BareCopies(int file_fd, unsigned depth, std::size_t operation_bytes, std::vector<int> processors)
        : file_fd_(file_fd), depth_(depth), operation_bytes_(operation_bytes),
          chunk_bytes_(std::min(operation_bytes, chunk_bytes_max)),
          staging_buffer_count_(operation_bytes > chunk_bytes_max ? large_staging_buffer_count : depth),
          staging_(map_shared(staging_buffer_count_ * chunk_bytes_)), destination_(map_shared(depth * operation_bytes)),
          file_offsets_(depth), processors_(std::move(processors)) {
        if (sched_getaffinity(0, sizeof previous_processors_, &previous_processors_) != 0) {
            exit_with_errno("sched_getaffinity");
        }
    }
    ~BareCopies() {
        munmap(staging_, staging_buffer_count_ * chunk_bytes_);
        munmap(destination_, depth_ * operation_bytes_);
    }
    BareCopies(const BareCopies&) = delete;
    BareCopies& operator=(const BareCopies&) = delete;

    // Returns whether there are at least two processors. The two threads spin while they wait for each other, so each
    // needs its own processor.
    [[nodiscard]] bool is_available() const { return processors_.size() > 1; }

    // Reads the bytes of one operation at the offset that next_offset() returns, in chunks, and passes the chunks to
    // the copying thread. Returns the number of operations, 1.
    template <typename NextOffset> unsigned run_step(NextOffset next_offset) {
        if (!copying_thread_.joinable()) {
            is_turn_ending_ = false;
            pin_thread(pthread_self(), processors_.front());
            copying_thread_ = std::thread([this] { copy_chunks(); });
            pin_thread(copying_thread_.native_handle(), processors_.back());
        }
        const std::uint64_t offset = file_offsets_[operation_count_++ % depth_] = next_offset();
        for (std::size_t chunk_offset = 0; chunk_offset < operation_bytes_; chunk_offset += chunk_bytes_) {
            spin_until([&] {
                return read_chunk_count_ - copied_chunk_count_.load(std::memory_order_acquire) < staging_buffer_count_;
            });
            std::uint8_t* const buffer = staging_ + read_chunk_count_ % staging_buffer_count_ * chunk_bytes_;
            if (pread(file_fd_, buffer, chunk_bytes_, static_cast<off_t>(offset + chunk_offset)) !=
                static_cast<ssize_t>(chunk_bytes_)) {
                exit_with_errno("pread");
            }
            storage::crc32c_chunks(reinterpret_cast<const std::byte*>(buffer), bytes_per_crc,
                                   chunk_bytes_ / bytes_per_crc, crcs_);
            ready_chunk_count_.store(++read_chunk_count_, std::memory_order_release);
        }
        return 1;
    }
    // Ends a turn (the time for which path_bench.cpp repeats run_step()): waits for the last copies, and lets this
    // thread run on its previous processors again. Returns 0, because run_step() has counted all operations.
    unsigned end_turn() {
        is_turn_ending_ = true;
        copying_thread_.join();
        pthread_setaffinity_np(pthread_self(), sizeof previous_processors_, &previous_processors_);
        return 0;
    }
    // Compares the data of the last operations with the file, and exits if they differ.
    void compare() const {
        std::vector<std::uint8_t> expected_bytes(operation_bytes_);
        for (std::uint64_t destination_index = 0; destination_index < std::min<std::uint64_t>(operation_count_, depth_);
             ++destination_index) {
            const ssize_t read_bytes = pread(file_fd_, expected_bytes.data(), operation_bytes_,
                                             static_cast<off_t>(file_offsets_[destination_index]));
            if (read_bytes != static_cast<ssize_t>(operation_bytes_) ||
                std::memcmp(destination_ + destination_index * operation_bytes_, expected_bytes.data(),
                            operation_bytes_) != 0) {
                std::fprintf(stderr, "bare copies: the copied data differs from the file\n");
                std::exit(1);
            }
        }
    }

private:
    static constexpr std::size_t chunk_bytes_max = 256 * 1024;
    static constexpr std::size_t bytes_per_crc = 4096; // The storage server computes one CRC32C for these bytes.
    static constexpr std::size_t large_staging_buffer_count = 4; // Staging buffers if an operation has several chunks.

    // Maps shared memory without a file, like the memory of an iov.
    static std::uint8_t* map_shared(std::size_t size) {
        void* const memory =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (memory == MAP_FAILED) {
            exit_with_errno("mmap");
        }
        return static_cast<std::uint8_t*>(memory);
    }
    template <typename Condition> static void spin_until(Condition condition) {
        // Yield after every 256th check, because other threads may need this processor.
        for (unsigned check_count = 1; !condition(); ++check_count) {
            if (check_count % 256 == 0) {
                sched_yield();
            }
        }
    }
    // Runs on the copying thread: copies each chunk that run_step() has read. Returns after end_turn(), when no chunk
    // is left.
    void copy_chunks() {
        const std::size_t chunks_per_operation = operation_bytes_ / chunk_bytes_;
        for (std::uint64_t chunk_index = copied_chunk_count_;;
             copied_chunk_count_.store(++chunk_index, std::memory_order_release)) {
            bool is_turn_ending = false;
            spin_until([&] {
                is_turn_ending = is_turn_ending_;
                return ready_chunk_count_.load(std::memory_order_acquire) != chunk_index || is_turn_ending;
            });
            if (is_turn_ending && ready_chunk_count_ == chunk_index) {
                return;
            }
            std::memcpy(destination_ + chunk_index / chunks_per_operation % depth_ * operation_bytes_ +
                            chunk_index % chunks_per_operation * chunk_bytes_,
                        staging_ + chunk_index % staging_buffer_count_ * chunk_bytes_, chunk_bytes_);
        }
    }

    const int file_fd_;
    const unsigned depth_;
    const std::size_t operation_bytes_;
    const std::size_t chunk_bytes_, staging_buffer_count_; // Each staging buffer holds one chunk.
    std::uint8_t *const staging_, *const destination_;
    std::vector<std::uint64_t> file_offsets_; // File offset of the last operation in each buffer.
    const std::vector<int> processors_;
    cpu_set_t previous_processors_{};
    std::uint32_t crcs_[chunk_bytes_max / bytes_per_crc] = {};
    std::uint64_t operation_count_ = 0;
    std::uint64_t read_chunk_count_ = 0;               // Number of chunks that were read, for the reading thread.
    std::atomic<std::uint64_t> ready_chunk_count_{0};  // Same as read_chunk_count_, for the copying thread.
    std::atomic<std::uint64_t> copied_chunk_count_{0}; // Number of chunks that were copied.
    std::atomic<bool> is_turn_ending_{false};
    std::thread copying_thread_;
};

} // namespace gdrkit::usrbio::bench
