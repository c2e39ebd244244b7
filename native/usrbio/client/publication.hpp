// Publication of memory and rings under a name in <mount>/3fs-virt/iovs, so that the agent or the daemon of 3FS serves
// them and other processes find them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

namespace gdrkit::usrbio {

class AgentConnection;
class SharedMemory;

// Publishes `name` with the link target `target`. If the mount has an agent, the agent checks the request and creates
// the link. Otherwise this function creates the link by symlink(2), and does not use the share handle and the
// descriptors. The caller still owns the descriptors. Returns 0; -EEXIST, -EACCES, -EINVAL or another -errno of the
// agent or the file system; -ENOENT: `mount` is not a mount of 3FS; -EREMOTEIO: the agent has ended; or -ENOMEM.
int publish(const char* mount, std::string_view name, std::string_view target,
            std::span<const std::byte> share_handle = {}, std::span<const int> descriptors = {}) noexcept;

// Like publish(), for memory that SharedMemory::create_unnamed() has created without a name. The agent records the
// owner first and then gives the memory its name. So if this process is killed, even during this call, no file without
// an owner stays in /dev/shm. Without an agent, this function gives the memory its name.
int publish_unnamed(const char* mount, std::string_view name, std::string_view target, SharedMemory& memory) noexcept;

// Withdraws a publication. After 0 or -EREMOTEIO no NIC can access the memory, because the agent has deregistered the
// memory or has died. Other results: -ENOENT: the name is not published; -EBUSY or -ETIMEDOUT: operations may be in
// flight, so the caller must not free the memory.
int unpublish(const char* mount, std::string_view name) noexcept;

// Like unpublish(), and asks the agent to keep the memory registered. If the agent does so, sets `*keeping_agent` to
// the connection to this agent, else to null. The agent does not keep the registration of memory that another process
// borrowed.
int unpublish_and_keep(const char* mount, std::string_view name,
                       std::shared_ptr<AgentConnection>* keeping_agent) noexcept;

} // namespace gdrkit::usrbio
