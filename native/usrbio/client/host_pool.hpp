// The pool of host memory: it keeps the memory of large iovs, after they were destroyed, for later iovs of this
// process. The agent keeps the memory registered. So for a later iov of the same size, no pages need to be allocated
// and pinned. docs/decisions/0016-host-memory-pool.md has the reasons.
#pragma once

#include "common/descriptor.hpp"
#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/shared_memory.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace gdrkit::usrbio {

// Returns whether the pool may keep the memory of an iov of `size_bytes`.
bool may_keep_host_memory(std::size_t size_bytes) noexcept;

// Returns whether the idle memory of this process, with `size_bytes` more, is at most as large as the free space in the
// file system of `memory_fd`. Other processes need free space, because they cannot free the idle memory of this
// process.
bool leaves_enough_shared_memory(int memory_fd, std::size_t size_bytes) noexcept;

// Memory that no iov uses, and that the agent has registered. The descriptor of the file identifies the memory to the
// agent, even after the name of the file was removed.
struct KeptMemory {
    std::shared_ptr<SharedMemory> memory;
    Descriptor file;
};

// Returns whether the file of the memory still has a name. The agent removes the name when it ends the registration
// without a request of this process.
bool has_name(const KeptMemory& kept) noexcept;

// Returns idle memory of exactly this size and NUMA node that `agent` has registered, or null. The memory still has the
// contents of the earlier iov.
KeptMemory take_host_memory(const AgentConnection& agent, std::size_t size_bytes, int numa) noexcept;

// Keeps memory for later iovs. `agent` is the connection to the agent that keeps the memory registered. If the limit of
// idle bytes is exceeded, frees the memory that has been idle longest.
void keep_host_memory(KeptMemory kept, std::shared_ptr<AgentConnection> agent, int numa) noexcept;

// Asks `agent` to end the registration that it keeps for idle memory.
void drop_registration(const KeptMemory& kept, AgentConnection& agent) noexcept;

// Frees the memory that has been idle longest, until at most `bytes_max` are idle. If another thread is freeing memory,
// waits until that memory is free, too.
void trim_host_pool(std::size_t bytes_max) noexcept;

// Returns how many pieces of idle memory the pool has freed in this process.
std::uint64_t get_host_pool_freed_count() noexcept;

} // namespace gdrkit::usrbio
