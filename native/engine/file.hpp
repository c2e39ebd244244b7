// A file of a job. It has a buffered descriptor, and a second descriptor with O_DIRECT, which is opened at its first
// use.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "common/descriptor.hpp"
#include "engine/cache_state.hpp"

namespace gdrkit::engine {

class File : public std::enable_shared_from_this<File> {
public:
    // A file that this object opens at the first use, by its path and with these flags and mode. It is closed when no
    // bytes are pending any more.
    File(std::string path, int flags, unsigned mode) : path_(std::move(path)), flags_(flags), mode_(mode) {}
    // A file that the caller has opened. The caller owns `fd`, and this object owns only the descriptor with O_DIRECT.
    explicit File(int fd) : flags_(0), mode_(0), fd_(fd) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Returns the descriptor without O_DIRECT. Throws Error.
    int buffered_fd();
    // Returns the descriptor with O_DIRECT, or -1 if the file system does not support it (see direct_refusal).
    int direct_fd();
    // Returns the errno with which O_DIRECT failed, or 0 if it did not fail.
    int direct_refusal() const noexcept { return direct_errno_.load(std::memory_order_relaxed); }
    void set_direct_refusal(int number) noexcept { direct_errno_.store(number, std::memory_order_relaxed); }
    // The alignment of offsets, lengths and memory for O_DIRECT, in bytes, a power of two.
    std::uint64_t alignment_bytes() const noexcept { return alignment_bytes_.load(std::memory_order_relaxed); }
    // Returns the current size of the file. Throws Error.
    std::uint64_t size_bytes();
    // Returns how much of the range is cached. The range may reach beyond the end of the file.
    Residency residency_of(std::uint64_t offset, std::uint64_t length);
    // Adds bytes that the job is going to transfer. Has an effect only if this object opens the file by its path.
    void add_pending(std::uint64_t bytes) noexcept { pending_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
    // Removes pending bytes that were transferred or failed. Closes a file that was opened by its path when no bytes
    // are pending any more.
    void remove_pending(std::uint64_t bytes) noexcept;
    // Closes a file that was opened by its path, even if bytes are still pending.
    void end() noexcept;

    // The calls that use the descriptor of the caller are counted, so that the caller can wait for them before it
    // closes the descriptor. Returns false if the caller closes it.
    bool begin_use() noexcept;
    // Adds a use while the calling thread has one, so that the file is still open.
    void add_use() noexcept { users_count_.fetch_add(1); }
    void end_use() noexcept;
    // Refuses further uses, and waits until there are none.
    void begin_close() noexcept;
    // Closes the descriptor with O_DIRECT, or allows uses again if the caller did not close its descriptor.
    void end_close(bool is_closed) noexcept;

private:
    const std::string path_;
    const int flags_;
    const unsigned mode_;
    std::mutex open_mutex_;
    Descriptor owned_descriptor_;
    Descriptor owned_direct_descriptor_;
    std::atomic<int> fd_{-1};
    std::atomic<int> direct_fd_{-1};
    std::atomic<int> direct_errno_{0};
    std::atomic<std::uint64_t> alignment_bytes_{4096};
    std::atomic<std::uint64_t> pending_bytes_{0};
    std::atomic<std::uint32_t> users_count_{0};
    std::atomic<bool> is_closing_{false};
};

} // namespace gdrkit::engine
