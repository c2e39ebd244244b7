// A block of the GPU pool: one allocation of device memory, which several iovs use one after the other. A block saves
// the next iov these expensive steps: the allocation with its attributes, its IPC handle, its dma-buf, and the
// registration at the agent.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/gpu_memory.hpp"

namespace gdrkit::usrbio {

class GpuBlock {
public:
    // Allocates `block_bytes`, a multiple of 64 KiB, fills them with zeros and exports them. The primary context of the
    // device must be current. Returns 0; -ENOTSUP: this memory has no dma-buf; -ENOMEM; or another -errno.
    static int create(const cuda::Driver& driver, int device, std::size_t block_bytes,
                      std::unique_ptr<GpuBlock>* block);
    GpuBlock(const GpuBlock&) = delete;
    GpuBlock& operator=(const GpuBlock&) = delete;
    // Asks the agent to end the registration that it keeps, then frees the memory. If the agent does not confirm the
    // end, the memory is not freed, because a NIC may still access it.
    ~GpuBlock();

    // Returns false if the application has freed the memory by a reset of the context.
    [[nodiscard]] bool is_intact() const noexcept;
    // Waits for the work of the context, and fills the memory with zeros. Returns 0 or -errno.
    int clear() noexcept;
    // Closes the dma-buf. Call it in a forked child, where the block cannot be used.
    void close_in_child() noexcept { dmabuf.descriptor.reset(); }

    const cuda::Driver& driver;
    const int device;
    const std::size_t block_bytes;
    cuda::DevicePointer base = 0;
    Allocation allocation;
    IpcBytes ipc{};
    Dmabuf dmabuf;
    // The connection to the agent that keeps the memory registered while the block is idle; null if no agent does.
    std::shared_ptr<AgentConnection> keeping_agent;
    std::chrono::steady_clock::time_point idle_since; // Only for an idle block.

private:
    GpuBlock(const cuda::Driver& driver, int device, std::size_t block_bytes);
    int export_and_clear();
    // Asks `keeping_agent`, if there is one, to end its registration. Returns 0 if the agent has no registration now.
    int drop_registration() noexcept;

    PrimaryContext primary_context_;
    std::uint64_t buffer_id_ = 0; // Id of the allocation, which the driver gives to no later allocation.
    pid_t creator_pid_;
};

// Returns true if less than a sixteenth of the memory of the current context's device would remain free after an
// allocation of `bytes`.
bool would_exhaust_memory(const cuda::Driver& driver, std::size_t bytes) noexcept;

} // namespace gdrkit::usrbio
