// A mapping of POSIX shared memory.
#pragma once

#include "common/descriptor.hpp"

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
    ~SharedMemory(); // Unmaps the memory, and removes the name if this process created it and did not remove it before.

    // `name` as for shm_open. numa: NUMA node, -1: any. All pages are allocated, so that a write raises no SIGBUS when
    // /dev/shm is full. Returns 0 or -errno.
    int create(std::string name, std::size_t bytes, int numa) noexcept;
    // Same without a name: the kernel frees the memory with its last user, even if that is killed. If the kernel does
    // not support it, same as create().
    int create_unnamed(std::string name, std::size_t bytes, int numa) noexcept;
    // Returns the descriptor of memory that has no name yet, otherwise -1.
    int unnamed_fd() const noexcept { return unnamed_.get(); }
    // Gives the memory the name of create_unnamed(). Returns 0 or -errno.
    int create_name() noexcept;
    // Checks whether another process has given the memory its name, which the destructor then removes.
    void adopt_name() noexcept;
    // Returns 0 or -errno; -EIO: the memory is smaller than `bytes`.
    int open(std::string name, std::size_t bytes, int numa) noexcept;
    void remove_name() noexcept;

    std::uint8_t* base() const noexcept { return base_; }

private:
    int allocate(int fd, std::size_t bytes, int numa) noexcept;
    int map(int fd, std::size_t bytes, int numa) noexcept;

    Descriptor unnamed_;
    std::string pending_name_;
    std::string name_; // Name to remove; empty: none.
    std::uint8_t* base_ = nullptr;
    std::size_t bytes_ = 0;
    int process_ = 0; // The process that created the name; a forked child removes nothing.
};

// Requests pages on that NUMA node; a failure is logged. -1: any.
void prefer_node(void* memory, std::size_t bytes, int numa) noexcept;

} // namespace gdrkit::usrbio
