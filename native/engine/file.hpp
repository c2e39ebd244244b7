// A file of a job: its buffered descriptor, and beside it one with O_DIRECT, opened when first wanted.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "engine/cache_state.hpp"
#include "engine/descriptor.hpp"

namespace gdrkit::engine {

class File {
public:
    // A path that the first who needs it opens, with these flags and mode; closed when all that was expected is
    // settled.
    File(std::string path, int flags, unsigned mode) : path_(std::move(path)), flags_(flags), mode_(mode) {}
    // An open descriptor, borrowed; its descriptor with O_DIRECT lives as long as this.
    explicit File(int fd) : flags_(0), mode_(0), fd_(fd) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // The descriptor without O_DIRECT. Throws Error.
    int buffered();
    // The descriptor with O_DIRECT; -1 where the file system has no such I/O (see direct_refusal).
    int direct();
    // The errno with which O_DIRECT was refused; 0 when it was not.
    int direct_refusal() const noexcept { return refusal_.load(std::memory_order_relaxed); }
    void refuse_direct(int number) noexcept { refusal_.store(number, std::memory_order_relaxed); }
    // To what O_DIRECT wants offsets, lengths and memory aligned, a power of two.
    std::uint64_t alignment_bytes() const noexcept { return alignment_bytes_.load(std::memory_order_relaxed); }
    // Its size now. Throws Error.
    std::uint64_t size_bytes();
    // What of the range is cached; it may reach beyond the end of the file.
    Residency residency_of(std::uint64_t offset, std::uint64_t length);
    // So many bytes of a path will be moved.
    void expect(std::uint64_t bytes) noexcept { left_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
    // So many of them have been, or never will be.
    void settle(std::uint64_t bytes) noexcept;
    // Gives a path's descriptors back whatever is left.
    void end() noexcept;

private:
    const std::string path_;
    const int flags_;
    const unsigned mode_;
    std::mutex opening_;
    Descriptor owned_;
    Descriptor owned_direct_;
    std::atomic<int> fd_{-1};
    std::atomic<int> direct_fd_{-1};
    std::atomic<int> refusal_{0};
    std::atomic<std::uint64_t> alignment_bytes_{4096};
    std::atomic<std::uint64_t> left_bytes_{0};
};

} // namespace gdrkit::engine
