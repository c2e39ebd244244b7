// The memory behind a memory region: host memory, a mapped dma-buf, or device memory that only the GPU's driver can
// access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ibverbs/bounce_buffer.hpp"

namespace gdrkit::twin::verbs {

class Memory {
public:
    virtual ~Memory() = default;
    // Copy between the memory and a bounce buffer. Offsets are relative to the begin of the region, which has checked
    // the range. Return 0 or an errno.
    virtual int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t at, std::size_t size) = 0;
    virtual int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t at, std::size_t size) = 0;
    // Return the address of the memory, to move bytes between it and a pipe; nullptr if only a driver can access it.
    [[nodiscard]] virtual std::byte* mapped(std::uint64_t) { return nullptr; }
};

// Each of the following creates the memory of a region. It returns 0 or an errno.

// Host memory, checked and counted as pinning would do it: ENOMEM or EPERM by RLIMIT_MEMLOCK, EFAULT if a page is not
// mapped with the access that `writable` asks for.
int make_host_memory(void* address, std::uint64_t length_bytes, bool writable, std::unique_ptr<Memory>* memory);

// The part [offset_bytes, offset_bytes + length_bytes) of a twin's dma-buf.
int make_mapped_dmabuf(int fd, std::uint64_t offset_bytes, std::uint64_t length_bytes, std::unique_ptr<Memory>* memory);

// Device memory at an address, copied by the CUDA driver that the process has loaded. EINVAL if the range is not device
// memory.
int make_cuda_memory(std::uint64_t address, std::uint64_t length_bytes, std::unique_ptr<Memory>* memory);

} // namespace gdrkit::twin::verbs
