// Publication of GPU iovs. The agent of a mount gets a dma-buf of the memory (or its IPC handle) and creates a symbolic
// link. In the mount of a 3FS daemon there is no agent, and this library only creates the link.
#pragma once

#include "usrbio/client/gpu_backing.hpp"
#include "usrbio/client/gpu_target.hpp"

namespace gdrkit::usrbio {

// Publishes the memory of `gpu_iov` under the UUID `id`. Returns 0 or the -errno of the agent or of symlink(2), such as
// -EEXIST. Memory without an IPC handle can be published only as a dma-buf to an agent: returns -ENOTSUP if the mount
// has no agent or the driver exports no dma-buf of the memory.
int publish_gpu_iov(GpuIov& gpu_iov, const std::uint8_t id[16]);

// Sets `uuid` to the UUID of the device. Returns 0, or -ENODEV if the driver does not report a UUID.
int query_device_uuid(const GpuIov& gpu_iov, std::array<std::uint8_t, 16>* uuid);

// Finds the publication with this UUID in a mount, and sets `name` to the name of its link. Returns -ENOENT if no link
// has this UUID, -EINVAL if several links have it, or the -errno with which reading the directory failed.
int find_publication(const char* mount, const std::uint8_t id[16], std::string* name);

// Finds in the mount of `gpu_iov` the publication of the memory that `gpu_iov` has mapped from another process. Sets
// `id` to the UUID of the publication, and borrows the publication. `offset_bytes` is the offset of the memory in its
// allocation. Returns 0 and an `id` of zeros if the memory is not published in this mount, or the -errno of
// BorrowedPublication::borrow().
int borrow_owner_publication(GpuIov& gpu_iov, std::uint64_t offset_bytes, std::uint8_t id[16]);

} // namespace gdrkit::usrbio
