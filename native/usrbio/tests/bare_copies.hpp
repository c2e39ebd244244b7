// What the path does to the bytes, in the same order and by as many threads, and nothing else: one reads pieces of the
// file into staging memory and sums them chunk by chunk, another, on a processor of its own, copies them to where they
// are wanted. No ring, no frames, no keys, no wakes. It is no limit of the machine: other pieces, or two threads that
// each do all of it, may be faster.
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
        : file_(file), depth_(depth), bytes_(bytes), piece_bytes_(std::min(bytes, piece_bytes_max)),
          slot_count_(bytes > piece_bytes_max ? slots_large : depth), staging_(shared(slot_count_ * piece_bytes_)),
          memory_(shared(depth * bytes)), offsets_(depth), processors_(std::move(processors)) {
        if (sched_getaffinity(0, sizeof before_, &before_) != 0) {
            give_up("sched_getaffinity");
        }
    }
    ~BareCopies() {
        munmap(staging_, slot_count_ * piece_bytes_);
        munmap(memory_, depth_ * bytes_);
    }
    BareCopies(const BareCopies&) = delete;
    BareCopies& operator=(const BareCopies&) = delete;

    // Two threads that wait for each other need two processors.
    [[nodiscard]] bool is_there() const { return processors_.size() > 1; }

    template <typename Next> unsigned step(Next next) {
        if (!copier_.joinable()) {
            is_over_ = false;
            keep_to(pthread_self(), processors_.front());
            copier_ = std::thread([this] { copy(); });
            keep_to(copier_.native_handle(), processors_.back());
        }
        const std::uint64_t offset = offsets_[operations_++ % depth_] = next();
        for (std::size_t at = 0; at < bytes_; at += piece_bytes_) {
            wait_until([&] { return made_ - copied_.load(std::memory_order_acquire) < slot_count_; });
            std::uint8_t* const slot = staging_ + made_ % slot_count_ * piece_bytes_;
            if (pread(file_, slot, piece_bytes_, static_cast<off_t>(offset + at)) !=
                static_cast<ssize_t>(piece_bytes_)) {
                give_up("pread");
            }
            storage::crc32c_chunks(reinterpret_cast<const std::byte*>(slot), chunk_bytes, piece_bytes_ / chunk_bytes,
                                   sums_);
            ready_.store(++made_, std::memory_order_release);
        }
        return 1;
    }
    // Waits for the last copies; this thread runs where it did before.
    unsigned end() {
        is_over_ = true;
        copier_.join();
        pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
        return 0;
    }
    // What the last operations brought.
    void compare() const {
        std::vector<std::uint8_t> there(bytes_);
        for (std::uint64_t slot = 0; slot < std::min<std::uint64_t>(operations_, depth_); ++slot) {
            const ssize_t count = pread(file_, there.data(), bytes_, static_cast<off_t>(offsets_[slot]));
            if (count != static_cast<ssize_t>(bytes_) ||
                std::memcmp(memory_ + slot * bytes_, there.data(), bytes_) != 0) {
                std::fprintf(stderr, "bare copies: one brought other bytes than the file has\n");
                std::exit(1);
            }
        }
    }

private:
    static constexpr std::size_t piece_bytes_max = 256 * 1024, chunk_bytes = 4096, slots_large = 4;

    // As the memory of an iov is: of a file that has no place.
    static std::uint8_t* shared(std::size_t size) {
        void* const made =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (made == MAP_FAILED) {
            give_up("mmap");
        }
        return static_cast<std::uint8_t*>(made);
    }
    static void keep_to(pthread_t thread, int processor) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(processor, &one);
        pthread_setaffinity_np(thread, sizeof one, &one);
    }
    template <typename Seen> static void wait_until(Seen seen) {
        // Others who want this processor get it now and then.
        for (unsigned look = 1; !seen(); ++look) {
            if (look % 256 == 0) {
                sched_yield();
            }
        }
    }
    void copy() {
        const std::size_t pieces = bytes_ / piece_bytes_;
        for (std::uint64_t done = copied_;; copied_.store(++done, std::memory_order_release)) {
            bool is_over = false;
            wait_until([&] {
                is_over = is_over_;
                return ready_.load(std::memory_order_acquire) != done || is_over;
            });
            if (is_over && ready_ == done) {
                return;
            }
            std::memcpy(memory_ + done / pieces % depth_ * bytes_ + done % pieces * piece_bytes_,
                        staging_ + done % slot_count_ * piece_bytes_, piece_bytes_);
        }
    }

    const int file_;
    const unsigned depth_;
    const std::size_t bytes_, piece_bytes_, slot_count_;
    std::uint8_t *const staging_, *const memory_;
    std::vector<std::uint64_t> offsets_;
    const std::vector<int> processors_;
    cpu_set_t before_{};
    std::uint32_t sums_[piece_bytes_max / chunk_bytes] = {};
    std::uint64_t operations_ = 0, made_ = 0;
    std::atomic<std::uint64_t> ready_{0}, copied_{0};
    std::atomic<bool> is_over_{false};
    std::thread copier_;
};

} // namespace gdrkit::usrbio::bench
