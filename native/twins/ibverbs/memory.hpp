// The memory of a memory region: host memory, a mapped dma-buf, or device memory that only the CUDA driver can access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ibverbs/bounce_buffer.hpp"

namespace gdrkit::twin::verbs {

class Memory {
public:
    virtual ~Memory() = default;
    // Copy from the memory into a bounce buffer, or from a bounce buffer into the memory. `offset` is relative to the
    // start of the region. The caller has checked that the range lies in the region. Return 0 or an errno.
    virtual int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t bounce_offset, std::size_t size_bytes) = 0;
    virtual int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t bounce_offset,
                      std::size_t size_bytes) = 0;
    // Return the address in this process of the byte at `offset`; nullptr if only a driver can access the memory.
    [[nodiscard]] virtual std::byte* mapped_address(std::uint64_t /*offset*/) { return nullptr; }
};

// Each of the following functions creates the memory of a region and returns 0 or an errno.

// Use host memory, checked and counted as if a driver pinned it. ENOMEM or EPERM: RLIMIT_MEMLOCK is exceeded. EFAULT: a
// page is not mapped, or is not writable although `must_be_writable` is true.
int make_host_memory(void* address, std::uint64_t length_bytes, bool must_be_writable, std::unique_ptr<Memory>* memory);

// Use the part [offset_bytes, offset_bytes + length_bytes) of a twin's dma-buf.
int make_mapped_dmabuf(int fd, std::uint64_t offset_bytes, std::uint64_t length_bytes, std::unique_ptr<Memory>* memory);

// Use device memory at an address. The CUDA driver that the process has loaded copies from and to this memory. EINVAL:
// the range is not device memory.
int make_cuda_memory(std::uint64_t address, std::uint64_t length_bytes, std::unique_ptr<Memory>* memory);

} // namespace gdrkit::twin::verbs
