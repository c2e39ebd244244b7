// How a GPU iov becomes known: to the agent of the mount with its dma-buf, or to a 3FS daemon by a symbolic link alone.
#pragma once

#include "usrbio/client/gpu_backing.hpp"
#include "usrbio/client/gpu_target.hpp"

namespace gdrkit::usrbio {

// Publishes the memory of `gpu` as `id`. -EEXIST and whatever else the agent or the link answers, exactly; -ENOTSUP:
// neither IPC nor a dma-buf goes from this memory to the other side.
int publish_gpu_iov(GpuIov& gpu, const std::uint8_t id[16]);

// What others are told of the memory: never an address, which means nothing in their processes.
GpuTarget target_of(const GpuIov& gpu, const Dmabuf& dmabuf);

// -ENODEV when the driver does not say.
int uuid_of(const GpuIov& gpu, std::array<std::uint8_t, 16>* uuid);

// The mapping of another process's memory that `gpu` is: finds the publication of those bytes in its mount and borrows
// it, so that operations may name them by its id. 0 and zeros: they are not published there. Or -errno of Borrowing.
int borrow_publication(GpuIov& gpu, std::uint64_t offset_bytes, std::uint8_t id[16]);

} // namespace gdrkit::usrbio
