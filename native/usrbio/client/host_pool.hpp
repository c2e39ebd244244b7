// The pool of host memory: it keeps the memory of destroyed large iovs for later iovs of this process. The agent keeps
// the memory registered, so that a later iov of the same size neither allocates pages nor pins them.
// docs/decisions/0016-host-memory-pool.md has the reasons.
#pragma once

#include "common/descriptor.hpp"
#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/shared_memory.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace gdrkit::usrbio {

// Returns whether an iov of `size_bytes` may leave its memory to the pool.
bool may_keep_host_memory(std::size_t size_bytes) noexcept;

// Returns whether the idle memory, with `size_bytes` more, is not larger than the free space in the file system of
// `file`. Other processes cannot free the idle memory of this process.
bool leaves_shared_memory_free(int file, std::size_t size_bytes) noexcept;

// Memory that no iov uses, and that the agent has registered. The descriptor of the file identifies the memory to the
// agent, even after the name of the file was removed.
struct KeptMemory {
    std::shared_ptr<SharedMemory> memory;
    Descriptor file;
};

// Returns whether the file of the memory still has a name. The agent removes the name of memory whose registration it
// ends by itself.
bool has_name(const KeptMemory& kept) noexcept;

// Returns idle memory of exactly this size and NUMA node that `agent` has registered, or null. The memory still has the
// contents of the earlier iov.
KeptMemory take_host_memory(const AgentConnection& agent, std::size_t size_bytes, int numa) noexcept;

// Keeps memory for later iovs. `agent` keeps its registration. If the limit of idle bytes is exceeded, frees the memory
// that has been idle longest.
void keep_host_memory(KeptMemory kept, std::shared_ptr<AgentConnection> agent, int numa) noexcept;

// Asks `agent` to end the registration that it keeps for idle memory.
void drop_registration(const KeptMemory& kept, AgentConnection& agent) noexcept;

// Frees the memory that has been idle longest, until at most `bytes_max` are idle. If another thread is freeing memory,
// waits until that memory is free, too.
void trim_host_pool(std::size_t bytes_max) noexcept;

// Returns how often the pool has freed memory in this process.
std::uint64_t count_host_pool_frees() noexcept;

} // namespace gdrkit::usrbio
