// A lower bound for the path: the same copies of the same bytes by as many threads, and nothing else. One thread reads
// chunks of the file into staging memory and computes their CRC32C. Another thread, on its own processor, copies them
// to their destination. There are no rings, frames, keys and wake-ups. Other chunk sizes, or two threads that each do
// all steps, may be faster.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "path_peers.hpp"
#include "storage/crc32c.hpp"

namespace gdrkit::usrbio::bench {

class BareCopies {
public:
    // The first thread runs on the first of these processors, the other one on the last.
    BareCopies(int file, unsigned depth, std::size_t bytes, std::vector<int> processors)
        : file_(file), depth_(depth), bytes_(bytes), buffer_bytes_(std::min(bytes, buffer_bytes_max)),
          buffer_count_(bytes > buffer_bytes_max ? buffers_large : depth),
          staging_(map_shared(buffer_count_ * buffer_bytes_)), memory_(map_shared(depth * bytes)), offsets_(depth),
          processors_(std::move(processors)) {
        if (sched_getaffinity(0, sizeof previous_processors_, &previous_processors_) != 0) {
            exit_failed("sched_getaffinity");
        }
    }
    ~BareCopies() {
        munmap(staging_, buffer_count_ * buffer_bytes_);
        munmap(memory_, depth_ * bytes_);
    }
    BareCopies(const BareCopies&) = delete;
    BareCopies& operator=(const BareCopies&) = delete;

    // Two threads that wait for each other need two processors.
    [[nodiscard]] bool is_possible() const { return processors_.size() > 1; }

    template <typename Next> unsigned step(Next next) {
        if (!copier_.joinable()) {
            is_ending_ = false;
            pin_thread(pthread_self(), processors_.front());
            copier_ = std::thread([this] { copy(); });
            pin_thread(copier_.native_handle(), processors_.back());
        }
        const std::uint64_t offset = offsets_[operations_++ % depth_] = next();
        for (std::size_t position = 0; position < bytes_; position += buffer_bytes_) {
            wait_until([&] { return read_ - copied_.load(std::memory_order_acquire) < buffer_count_; });
            std::uint8_t* const buffer = staging_ + read_ % buffer_count_ * buffer_bytes_;
            if (pread(file_, buffer, buffer_bytes_, static_cast<off_t>(offset + position)) !=
                static_cast<ssize_t>(buffer_bytes_)) {
                exit_failed("pread");
            }
            storage::crc32c_chunks(reinterpret_cast<const std::byte*>(buffer), chunk_bytes, buffer_bytes_ / chunk_bytes,
                                   sums_);
            ready_.store(++read_, std::memory_order_release);
        }
        return 1;
    }
    // Waits for the last copies. Afterwards this thread may run on its previous processors.
    unsigned end() {
        is_ending_ = true;
        copier_.join();
        pthread_setaffinity_np(pthread_self(), sizeof previous_processors_, &previous_processors_);
        return 0;
    }
    // Compares the data of the last operations with the file.
    void compare() const {
        std::vector<std::uint8_t> expected(bytes_);
        for (std::uint64_t buffer = 0; buffer < std::min<std::uint64_t>(operations_, depth_); ++buffer) {
            const ssize_t count = pread(file_, expected.data(), bytes_, static_cast<off_t>(offsets_[buffer]));
            if (count != static_cast<ssize_t>(bytes_) ||
                std::memcmp(memory_ + buffer * bytes_, expected.data(), bytes_) != 0) {
                std::fprintf(stderr, "bare copies: the copied data differs from the file\n");
                std::exit(1);
            }
        }
    }

private:
    static constexpr std::size_t buffer_bytes_max = 256 * 1024, chunk_bytes = 4096, buffers_large = 4;

    // Maps shared memory without a file, like the memory of an iov.
    static std::uint8_t* map_shared(std::size_t size) {
        void* const memory =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (memory == MAP_FAILED) {
            exit_failed("mmap");
        }
        return static_cast<std::uint8_t*>(memory);
    }
    static void pin_thread(pthread_t thread, int processor) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(processor, &set);
        pthread_setaffinity_np(thread, sizeof set, &set);
    }
    template <typename Condition> static void wait_until(Condition condition) {
        // Other threads may need this processor.
        for (unsigned round = 1; !condition(); ++round) {
            if (round % 256 == 0) {
                sched_yield();
            }
        }
    }
    void copy() {
        const std::size_t buffers_per_operation = bytes_ / buffer_bytes_;
        for (std::uint64_t copied = copied_;; copied_.store(++copied, std::memory_order_release)) {
            bool is_ending = false;
            wait_until([&] {
                is_ending = is_ending_;
                return ready_.load(std::memory_order_acquire) != copied || is_ending;
            });
            if (is_ending && ready_ == copied) {
                return;
            }
            std::memcpy(memory_ + copied / buffers_per_operation % depth_ * bytes_ +
                            copied % buffers_per_operation * buffer_bytes_,
                        staging_ + copied % buffer_count_ * buffer_bytes_, buffer_bytes_);
        }
    }

    const int file_;
    const unsigned depth_;
    const std::size_t bytes_, buffer_bytes_, buffer_count_;
    std::uint8_t *const staging_, *const memory_;
    std::vector<std::uint64_t> offsets_;
    const std::vector<int> processors_;
    cpu_set_t previous_processors_{};
    std::uint32_t sums_[buffer_bytes_max / chunk_bytes] = {};
    std::uint64_t operations_ = 0, read_ = 0;
    std::atomic<std::uint64_t> ready_{0}, copied_{0};
    std::atomic<bool> is_ending_{false};
    std::thread copier_;
};

} // namespace gdrkit::usrbio::bench
