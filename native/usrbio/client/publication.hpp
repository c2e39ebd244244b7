// What applications publish: memory and rings, under a name in <mount>/3fs-virt/iovs.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace gdrkit::usrbio {

// Publishes `name` with what its link says. The agent's answer is the verdict; where no agent listens it is that of
// symlink(), and a share handle, which a link cannot carry, is dropped. The descriptors stay the caller's.
// 0 or -errno: -EEXIST, -EACCES, -EINVAL ... as agent or file system say; -ENOENT: no 3FS mount; -EREMOTEIO: the agent
// is gone; -ENOMEM.
int publish(const char* mount, std::string_view name, std::string_view target,
            std::span<const std::byte> share_handle = {}, std::span<const int> descriptors = {}) noexcept;

// Takes it back. When it returns 0 or -EREMOTEIO no NIC reaches that memory any more: an agent has deregistered it, or
// is dead. 0 or -errno: -ENOENT: nothing of that name; -EBUSY, -ETIMEDOUT: the agent could not say that nothing is in
// flight any more, so the memory is not free yet.
int unpublish(const char* mount, std::string_view name) noexcept;

} // namespace gdrkit::usrbio
