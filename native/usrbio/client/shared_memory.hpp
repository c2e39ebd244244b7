// A mapping of POSIX shared memory.
#pragma once

#include "usrbio/client/descriptor.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace gdrkit::usrbio {

class SharedMemory {
public:
    SharedMemory() = default;
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;
    ~SharedMemory(); // Unmaps; removes the name if this process created it and it is still there.

    // name as of shm_open. numa: -1 any. The pages are there afterwards: who writes to it meets no SIGBUS when /dev/shm
    // is full. 0 or -errno.
    int create(std::string name, std::size_t bytes, int numa) noexcept;
    // The same without a name, which the kernel frees with its last user however that ends. Where the kernel has none,
    // it is as create().
    int create_unnamed(std::string name, std::size_t bytes, int numa) noexcept;
    // Of memory that has no name yet; else -1.
    int unnamed() const noexcept { return unnamed_.get(); }
    // Gives it the name that it was created with; 0 or -errno.
    int give_name() noexcept;
    // Somebody else may have given it that: looks, and has it removed at the end if so.
    void take_name() noexcept;
    // 0 or -errno; -EIO: it is smaller.
    int open(std::string name, std::size_t bytes, int numa) noexcept;
    void remove_name() noexcept;

    std::uint8_t* base() const noexcept { return base_; }

private:
    int fill(int fd, std::size_t bytes, int numa) noexcept;
    int map(int fd, std::size_t bytes, int numa) noexcept;

    Descriptor unnamed_;
    std::string future_name_;
    std::string name_; // To be removed; empty: nothing is.
    std::uint8_t* base_ = nullptr;
    std::size_t bytes_ = 0;
    int process_ = 0; // A forked child removes nothing.
};

// Asks for pages on that node; a refusal is logged. -1: any.
void prefer_node(void* memory, std::size_t bytes, int numa) noexcept;

} // namespace gdrkit::usrbio
