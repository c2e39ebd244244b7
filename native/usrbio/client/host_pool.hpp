// The pool of host memory: memory of large iovs that were destroyed, for later iovs of this process. The agent keeps
// its registration, so that a later iov of the same size neither allocates pages nor pins them.
// docs/decisions/0016-host-memory-pool.md has the reasons.
#pragma once

#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/shared_memory.hpp"

#include <cstddef>
#include <memory>

namespace gdrkit::usrbio {

// Returns whether an iov of `size_bytes` may leave its memory to the pool.
bool may_keep_host_memory(std::size_t size_bytes) noexcept;

// Returns idle memory of exactly this size and NUMA node that `agent` has registered, or null. It still has the
// contents of the earlier iov.
std::shared_ptr<SharedMemory> take_host_memory(const AgentConnection& agent, std::size_t size_bytes, int numa) noexcept;

// Keeps memory for later iovs. `agent` keeps its registration. If the limit of idle bytes is exceeded, frees the memory
// that has been idle longest.
void keep_host_memory(std::shared_ptr<SharedMemory> memory, std::shared_ptr<AgentConnection> agent, int numa) noexcept;

// Asks `agent` to end the registration that it keeps for idle memory.
void drop_registration(const SharedMemory& memory, AgentConnection& agent) noexcept;

// Frees the memory that has been idle longest, until at most `bytes_max` are idle. Returns whether it freed any.
bool trim_host_pool(std::size_t bytes_max) noexcept;

} // namespace gdrkit::usrbio
