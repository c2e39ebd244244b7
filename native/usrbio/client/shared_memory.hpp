// A mapping of POSIX shared memory in /dev/shm, for iovs and rings in host memory.
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
    ~SharedMemory(); // Unmaps the memory. Removes the name if it exists and this process is responsible for it.

    // Creates and maps memory. `name`: as for shm_open. `numa`: NUMA node, or -1 for any. Allocates all pages, so that
    // a write raises no SIGBUS when /dev/shm is full. Returns 0 or -errno.
    int create(std::string name, std::size_t bytes, int numa) noexcept;
    // Like create(), but does not create `name` yet. As long as the memory has no name, the kernel frees the memory
    // when the last process that uses it has ended. If the kernel does not support files without a name (O_TMPFILE),
    // does the same as create().
    int create_unnamed(std::string name, std::size_t bytes, int numa) noexcept;
    // Returns the descriptor of memory that has no name yet, otherwise -1.
    int unnamed_fd() const noexcept { return unnamed_descriptor_.get(); }
    // Gives the memory the name passed to create_unnamed(). Returns 0 or -errno.
    int create_name() noexcept;
    // Checks whether the agent has given the memory its name. If so, this process becomes responsible for the name, and
    // the destructor removes it. Closes the descriptor of unnamed_fd().
    void adopt_name() noexcept;
    // Maps existing memory. Returns 0 or -errno; -EIO: the memory is smaller than `bytes`.
    int open(const std::string& name, std::size_t bytes, int numa) noexcept;
    // Removes the name if this process is responsible for it, that is, created it and is not a forked child. The memory
    // stays mapped.
    void remove_name() noexcept;

    // Returns the name of the memory, as for shm_open, or an empty string if this process is not responsible for a
    // name.
    const std::string& name() const noexcept { return name_; }

    // Opens the file by its name. Returns an invalid descriptor on failure, or if this process is not responsible for a
    // name.
    Descriptor reopen() const noexcept;

    // Makes the whole mapping writable again, because the application may have changed it by mprotect(). Returns false
    // if the application has unmapped a part.
    bool make_writable() noexcept;

    std::uint8_t* base() const noexcept { return base_; }
    std::size_t bytes() const noexcept { return bytes_; }
    // Returns whether a child that this process has forked may have the memory mapped, too.
    bool may_be_mapped_by_child() const noexcept;

private:
    int allocate(int fd, std::size_t bytes, int numa) noexcept;
    int map(int fd, std::size_t bytes, int numa) noexcept;

    Descriptor unnamed_descriptor_;
    std::string pending_name_; // The name that memory without a name will get.
    std::string name_;         // The name that this process must remove; empty: none.
    std::uint8_t* base_ = nullptr;
    std::size_t bytes_ = 0;
    std::uint64_t fork_count_ = 0; // fork_count() when the memory was mapped.
    int creator_pid_ = 0; // The process that removes the name. A forked child has another pid and removes nothing.
};

// Binds the memory to a NUMA node, so that the kernel allocates its pages there. Does nothing if `numa` is -1. Logs a
// failure.
void bind_to_numa_node(void* memory, std::size_t bytes, int numa) noexcept;

} // namespace gdrkit::usrbio
