// A file of a job. It has a buffered descriptor, and a second descriptor with O_DIRECT, which is opened at its first
// use. It counts its uses, so that a close can wait for their end.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/descriptor.hpp"
#include "engine/cache_state.hpp"

namespace gdrkit::engine {

class File : public std::enable_shared_from_this<File> {
public:
    // A file that this object opens at the first use, by its path and with these flags and mode of open(2). The object
    // closes the file when no bytes are pending any more.
    File(std::string path, int flags, unsigned mode) : path_(std::move(path)), flags_(flags), mode_(mode) {}
    // An open file. This object owns the descriptor, and closes it in close() or in the destructor.
    explicit File(Descriptor descriptor)
        : flags_(0), mode_(0), owned_descriptor_(std::move(descriptor)), fd_(owned_descriptor_.get()) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Returns the descriptor without O_DIRECT. Throws Error.
    int buffered_fd();
    // Returns the descriptor without O_DIRECT if the file is open, else -1.
    int fd_if_open() const noexcept { return fd_.load(std::memory_order_acquire); }
    // Returns the descriptor with O_DIRECT, or -1 if O_DIRECT has failed (see direct_errno()).
    int direct_fd();
    // Returns the errno with which an open or a transfer with O_DIRECT failed, or 0.
    int direct_errno() const noexcept { return direct_errno_.load(std::memory_order_relaxed); }
    void disable_direct(int errno_value) noexcept { direct_errno_.store(errno_value, std::memory_order_relaxed); }
    // Returns the alignment that O_DIRECT needs for offsets, lengths and memory, in bytes. It is a power of two.
    std::uint64_t alignment_bytes() const noexcept { return alignment_bytes_.load(std::memory_order_relaxed); }
    // Returns the current size of the file. Throws Error.
    std::uint64_t size_bytes();
    // Returns how much of the range is cached. The range may reach beyond the end of the file.
    Residency residency_of(std::uint64_t offset, std::uint64_t length);
    // Adds bytes that the job is going to transfer. remove_pending() uses the count only for a file opened by its path.
    void add_pending(std::uint64_t bytes) noexcept { pending_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
    // Removes pending bytes that were transferred or failed. Closes a file that was opened by its path when no bytes
    // are pending any more.
    void remove_pending(std::uint64_t bytes) noexcept;
    // Closes a file that was opened by its path, even if bytes are still pending.
    void close_reopenable_descriptors() noexcept;

    // Counts a call or job that uses the descriptors, so that a close can wait for its end. Returns false if the file
    // is closed, or while a FileClosing object exists.
    bool begin_use() noexcept;
    // Counts one more use. The caller must already have a use, so that the file is open.
    void add_use() noexcept { uses_count_.fetch_add(1); }
    void end_use() noexcept;
    // Waits until there are no uses, at most `timeout`. Returns whether there are none.
    bool wait_until_unused(std::chrono::nanoseconds timeout) noexcept;
    // Begins a close of the file. Waits at most `timeout` while another thread closes it. Returns whether the close has
    // begun.
    bool begin_close(std::chrono::nanoseconds timeout) noexcept;
    void end_close() noexcept;
    // Closes the descriptors. If the file still has uses, the destructor of this object closes them. Throws the Error
    // of close(2); the file is closed nevertheless.
    void close();
    bool is_closed() const noexcept { return is_closed_.load(); }
    // Moves the descriptor into a new File, for a forked child. The child cannot use the locks and counts of this
    // object, because threads of the parent may have held them during the fork.
    std::shared_ptr<File> replace_after_fork();

    // The identifiers of the threads whose Python code uses or closes the file, once for each use. If a signal handler
    // closes the file during a use by its own thread, the close finds the thread here, and fails instead of waiting for
    // itself. Workers and calls without the GIL run no signal handlers, so they are not in the list. Only a thread with
    // the GIL may access it.
    std::vector<unsigned long> python_threads;

private:
    friend class FileClosing;

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
    std::atomic<std::uint32_t> uses_count_{0};
    std::atomic<std::uint32_t> is_close_in_progress_{0}; // 1 from begin_close() to end_close().
    std::atomic<bool> refuses_uses_{false};              // A FileClosing exists, or the file is closed.
    std::atomic<bool> is_closed_{false};
};

// A use of a file, which the destructor ends. If the file is closed, or while a FileClosing exists, the object is
// empty: file() is null.
class FileUse {
public:
    explicit FileUse(std::shared_ptr<File> file) : file_(file->begin_use() ? std::move(file) : nullptr) {}
    FileUse(FileUse&& other) noexcept : file_(std::move(other.file_)) {}
    FileUse& operator=(FileUse&&) = delete;
    ~FileUse() { end(); }
    void end() noexcept {
        if (const std::shared_ptr<File> file = std::move(file_)) {
            file->end_use();
        }
    }
    const std::shared_ptr<File>& file() const noexcept { return file_; }

private:
    std::shared_ptr<File> file_;
};

// While an object of this class exists, the file refuses further uses. The destructor allows them again, unless the
// file is closed, and calls end_close() if `has_begun_close` is set.
class FileClosing {
public:
    explicit FileClosing(File& file, bool has_begun_close = false) noexcept
        : file_(file), has_begun_close_(has_begun_close) {
        file_.refuses_uses_.store(true);
    }
    FileClosing(const FileClosing&) = delete;
    FileClosing& operator=(const FileClosing&) = delete;
    ~FileClosing() {
        file_.refuses_uses_.store(file_.is_closed());
        if (has_begun_close_) {
            file_.end_close();
        }
    }

private:
    File& file_;
    const bool has_begun_close_;
};

} // namespace gdrkit::engine
