// The pool of device memory: it keeps the blocks of destroyed iovs for later iovs of this process. A block goes only to
// an iov of the same mount and device. The memory of an iov that another process borrowed, or whose handle was
// exported, is freed instead. docs/decisions/0011-gpu-memory-pool.md has the reasons.
#pragma once

#include <cstddef>
#include <memory>

#include "usrbio/client/agent_connection.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

namespace gdrkit::usrbio {

// nvidia-peermem pins device memory in pages of this size. The library allocates whole pages, so that a NIC can access
// no other data.
inline constexpr std::size_t rdma_page_bytes = 65536;

class GpuBlock;

// Returns the size of the block for an iov of `size_bytes`, rounded up. Sizes of blocks are powers of two from 64 KiB
// on and, above 1 MiB, also 1.5 times these powers. So iovs of similar sizes can use the same block. An iov above 1 MiB
// leaves at most a third of a new block unused.
std::size_t choose_pool_block_bytes(std::size_t size_bytes) noexcept;

// Returns whether an iov of `size_bytes` may come from the pool: its block must not be larger than the limit of idle
// bytes.
bool may_use_gpu_pool(std::size_t size_bytes) noexcept;

// Takes a block out of the pool and returns it: the smallest idle block of this agent and device that has between one
// and two times `size_bytes`, which is rounded up to whole pages of a NIC first. Returns null if no block fits.
std::unique_ptr<GpuBlock> take_block(const AgentConnection& agent, int device, std::size_t size_bytes) noexcept;

// Clears a block and keeps it for later iovs. `agent` is the connection to the agent that keeps the memory registered.
// If the limit of idle bytes is exceeded, frees the blocks that have been idle longest.
void keep_block(std::unique_ptr<GpuBlock> block, std::shared_ptr<AgentConnection> agent) noexcept;

// Adds 1 to `refused_blocks` of the statistics: the number of iovs whose block the pool could not keep for a later iov.
void count_refused_block() noexcept;

// Frees the blocks that have been idle longest, until at most `bytes_max` are idle. Returns the number of blocks freed.
std::size_t trim_gpu_pool(std::size_t bytes_max) noexcept;

// Sets the limit of idle bytes (0: no pool) and the time after which an idle block is freed.
void set_gpu_pool_limits(std::size_t idle_bytes_max, unsigned idle_ms_max) noexcept;

gdrkit_gpu_pool_statistics_t get_gpu_pool_statistics() noexcept;

// The constructor of a block calls record_block(), and the destructor calls forget_block(). So the statistics also
// count the blocks that iovs use.
void record_block(GpuBlock& block);
void forget_block(GpuBlock& block) noexcept;

} // namespace gdrkit::usrbio
