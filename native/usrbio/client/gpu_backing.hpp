// Class GpuIov: one object for each GPU iov of this process. The object owns the device memory and its publication (the
// name in <mount>/3fs-virt/iovs under which the agent serves the memory), and releases both.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "usrbio/client/borrowed_publication.hpp"
#include "usrbio/client/gpu_block.hpp"
#include "usrbio/client/gpu_memory.hpp"
#include "usrbio/client/gpu_visibility.hpp"
#include "usrbio/client/iov_registry.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

namespace gdrkit::usrbio {

class GpuIov final : public IovBacking {
public:
    // Origin of the memory, which decides what happens to it when the iov ends. Allocated memory is freed, opened
    // memory is unmapped, and wrapped memory belongs to the application. Pooled memory is a block, which the pool keeps
    // for the next iov or frees.
    enum class Origin { allocated, pooled, wrapped, opened };

    GpuIov(const cuda::Driver& driver, int device);
    GpuIov(const GpuIov&) = delete;
    GpuIov& operator=(const GpuIov&) = delete;
    ~GpuIov() override; // Releases the memory unless destroy() did.

    void unlink(hf3fs_iov& iov) noexcept override;
    bool destroy(hf3fs_iov& iov) noexcept override;

    // Returns false in a child that was forked after the iov was created. A child can neither use the CUDA driver nor
    // withdraw the publication.
    [[nodiscard]] bool belongs_to_this_process() const noexcept;

    const cuda::Driver& driver;
    const int device;
    PrimaryContext primary_context;
    cuda::Context context = nullptr; // The context that holds the memory.
    Origin origin = Origin::wrapped;
    std::unique_ptr<GpuBlock> block; // Pooled memory.
    // Set when the application exported a handle of the memory. Another process may then map the memory at any time, so
    // the pool must not keep it for a later iov.
    std::atomic<bool> is_exported{false};
    cuda::DevicePointer owned_address = 0; // Address to free or unmap at the end; 0: wrapped or pooled memory.
    cuda::DevicePointer pointer = 0;       // Address of the first byte of the iov.
    std::size_t size_bytes = 0;
    Allocation allocation;                          // The allocation that contains the first byte.
    std::optional<IpcBytes> ipc;                    // IPC handle of `allocation`, if this type of memory has one.
    std::optional<ContextToFlush> context_to_flush; // Set if the device shows writes of NICs only after a flush.
    std::string mount;
    BorrowedPublication borrowed_publication; // For opened memory: the publication of the process that owns the memory.
    std::string publication_name;             // Name of the link; empty: this process has not published the memory.

private:
    // Withdraws the publication, if there is one. If `keeping_agent` is not null, asks the agent to keep the memory
    // registered. If the agent does so, sets `*keeping_agent` to the connection to this agent.
    int unpublish(std::shared_ptr<AgentConnection>* keeping_agent = nullptr) noexcept;
    void release_memory() noexcept; // Forgets the memory even if the driver fails to free or unmap it.

    std::mutex destruction_mutex_; // Locked during unlink and destroy.
    pid_t creator_pid_;
};

// Returns the object of the GPU iov. Returns null if the struct does not belong to a GPU iov, if the iov was destroyed,
// or if a parent process created it before a fork.
std::shared_ptr<GpuIov> find_gpu_iov(const hf3fs_iov* iov) noexcept;

} // namespace gdrkit::usrbio
