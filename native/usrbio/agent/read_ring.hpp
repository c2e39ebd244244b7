// Reads of many cached ranges by one system call (io_uring).
#pragma once

#include <linux/io_uring.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "common/descriptor.hpp"

namespace gdrkit::usrbio::agent {

// A read of bytes that are in the page cache.
struct CachedRead {
    int fd = -1;
    std::uint64_t offset = 0;
    std::span<std::byte> destination;
    std::int64_t result = 0; // The number of bytes, which may be smaller than requested, or a negative errno.
};

// The submission queue and the completion queue of an io_uring, for one thread. In contrast to class Ring, this class
// has nothing to do with a ring of a client. Many reads by one system call take a quarter less time than a system call
// for each of them.
class ReadRing {
public:
    ReadRing() = default;
    ~ReadRing() { close(); }
    ReadRing(const ReadRing&) = delete;
    ReadRing& operator=(const ReadRing&) = delete;

    // Largest number of reads in one call of read().
    static constexpr std::size_t reads_max = 64;

    // Executes at most reads_max reads as storage::read_cached() does, and sets their results. Returns false if
    // io_uring cannot be used: the kernel is older than 5.6, or a container or an administrator forbids it. The results
    // are then undefined. The first call creates the queues.
    bool read(std::span<CachedRead> reads) noexcept;
    // Stops using io_uring: later calls of read() return false.
    void close() noexcept;

private:
    struct Mapping {
        void* address = nullptr;
        std::size_t length = 0;
    };

    bool open() noexcept;
    bool submit_and_wait(std::uint32_t count) noexcept;
    std::uint32_t take_completions(std::span<CachedRead> reads) noexcept;
    template <class Value> Value* at(const Mapping& mapping, std::uint32_t offset) const noexcept {
        return reinterpret_cast<Value*>(static_cast<std::byte*>(mapping.address) + offset);
    }

    bool has_tried_to_open_ = false;
    Descriptor ring_;
    io_uring_params parameters_{};
    Mapping submission_queue_, completion_queue_, submission_entries_;
};

} // namespace gdrkit::usrbio::agent
