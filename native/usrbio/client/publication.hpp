// Publication of memory and rings, under a name in <mount>/3fs-virt/iovs.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace gdrkit::usrbio {

// Publishes `name` with the target of its link. If an agent listens, its verdict is the result. Otherwise the result is
// that of symlink(2), and the share handle is not used, because a link cannot carry it. The descriptors stay the
// caller's. Returns 0 or -errno: -EEXIST, -EACCES, -EINVAL ... of the agent or the file system; -ENOENT: not a mount of
// 3FS; -EREMOTEIO: the agent has ended; -ENOMEM.
int publish(const char* mount, std::string_view name, std::string_view target,
            std::span<const std::byte> share_handle = {}, std::span<const int> descriptors = {}) noexcept;

// Withdraws a publication. After 0 or -EREMOTEIO no NIC can access the memory: the agent has deregistered it, or is
// dead. Other errors: -ENOENT: the name is not published; -EBUSY, -ETIMEDOUT: the agent could not confirm that no
// operation is in flight, so the memory must not be freed.
int unpublish(const char* mount, std::string_view name) noexcept;

} // namespace gdrkit::usrbio
