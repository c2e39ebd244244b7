// The memory under a region, whatever it is: host memory, a mapped dma-buf, or memory that only a GPU's driver can
// reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ibverbs/bounce.hpp"

namespace gdrkit::twin::verbs {

class Memory {
public:
    virtual ~Memory() = default;
    // Offsets count from the begin of the region, which has checked the range. 0 or an errno.
    virtual int read(std::uint64_t offset, Bounce* bounce, std::size_t at, std::size_t size) = 0;
    virtual int write(std::uint64_t offset, const Bounce& bounce, std::size_t at, std::size_t size) = 0;
    // Where this is, for what moves bytes between it and a pipe; nullptr of memory that only a driver reaches.
    [[nodiscard]] virtual std::byte* mapped(std::uint64_t) { return nullptr; }
};

// Each of these makes the memory of a region or returns an errno.

// Host memory, checked and counted as pinning it would do: ENOMEM or EPERM by RLIMIT_MEMLOCK, EFAULT where it is not
// mapped so.
int make_host_memory(void* address, std::uint64_t length_bytes, bool writable, std::unique_ptr<Memory>* memory);

// The part [offset, offset + length) of a dma-buf of a twin.
int make_mapped_dmabuf(int fd, std::uint64_t offset_bytes, std::uint64_t length_bytes, std::unique_ptr<Memory>* memory);

// Device memory by its address, moved by the CUDA driver that the process has loaded. EINVAL when the range is not
// device memory.
int make_cuda_memory(std::uint64_t address, std::uint64_t length_bytes, std::unique_ptr<Memory>* memory);

} // namespace gdrkit::twin::verbs
