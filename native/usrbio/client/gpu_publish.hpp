// Publication of GPU iovs: to the agent of the mount with a dma-buf, or to a 3FS daemon by a symbolic link only.
#pragma once

#include "usrbio/client/gpu_backing.hpp"
#include "usrbio/client/gpu_target.hpp"

namespace gdrkit::usrbio {

// Publishes the memory of `gpu` as `id`. Returns 0, the -errno of the agent or of symlink(2) (such as -EEXIST), or
// -ENOTSUP: this memory has neither an IPC handle nor a dma-buf that the other side accepts.
int publish_gpu_iov(GpuIov& gpu, const std::uint8_t id[16]);

// Returns the target of the link. It never contains an address, which has no meaning in other processes.
GpuTarget link_target(const GpuIov& gpu, const Dmabuf& dmabuf);

// Returns -ENODEV if the driver does not report it.
int query_device_uuid(const GpuIov& gpu, std::array<std::uint8_t, 16>* uuid);

// Finds the publication of the memory that `gpu` has mapped from another process in its mount, returns its id and
// borrows it. Returns 0 and zeros if the memory is not published there, or the -errno of BorrowedPublication.
int borrow_publication(GpuIov& gpu, std::uint64_t offset_bytes, std::uint8_t id[16]);

} // namespace gdrkit::usrbio
