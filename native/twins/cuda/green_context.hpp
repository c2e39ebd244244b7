// Green contexts: contexts with a part of the multiprocessors of a device. The twin runs no kernels, so the parts are
// only numbers; streams of a green context carry out copies as other streams do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/context.hpp"

namespace gdrkit::twin::cuda {

// CUdevResourceType, CUdevSmResourceSplit_flags, CUgreenCtxCreate_flags
enum ResourceType : std::int32_t { resource_invalid = 0, resource_multiprocessors = 1 };
enum SplitFlags : std::uint32_t { split_ignore_coscheduling = 1, split_max_cluster_size = 2 };
inline constexpr unsigned green_context_default_stream_flag = 1;

// CUdevResource. Its bytes between `type` and `count` are private to the driver. This twin has its own members there.
struct DeviceResource {
    std::int32_t type;
    std::uint32_t magic;
    Device device;
    std::uint32_t split_id;   // identifies the split that made the resource; 0: none
    std::uint32_t part_index; // the index of the resource among the parts of this split
    std::uint8_t unused[76];
    std::uint32_t count;         // number of multiprocessors (smCount)
    std::uint32_t partition_min; // smallest number of multiprocessors of a part (minSmPartitionSize)
    std::uint32_t alignment;     // a part has a multiple of this number of multiprocessors (smCoscheduledAlignment)
    std::uint8_t unused_too[36];
};
static_assert(sizeof(DeviceResource) == 144 && offsetof(DeviceResource, count) == 96);

// Return the context (CUcontext) of each green context of a device.
std::vector<ContextRef> list_green_contexts(Device device);

} // namespace gdrkit::twin::cuda
