// Green contexts and the resources from which they are made.
#include "cuda/green_context.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <span>

#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/registry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// A split divides the multiprocessors of a resource into parts that consist of whole groups. These are the numbers of
// multiprocessors in a group, for compute capability 9.0. A group of 8 can run all thread blocks of a cluster at the
// same time. With split_ignore_coscheduling, a group has only 2 multiprocessors.
constexpr std::uint32_t coscheduled_group_size = 8, smallest_group_size = 2;
// This number marks a resource that the twin has made. Its bytes are "sm".
constexpr std::uint32_t resource_magic = 0x6d73;

struct GreenContext {
    ContextRef context;
    DeviceResource resource;
};

Registry<GreenContext>& green_contexts() {
    static auto* const instance = new Registry<GreenContext>("cuda_green_context");
    return *instance;
}

// The descriptors of resources. CUDA has no function that destroys a descriptor.
struct Descriptors {
    std::mutex mutex;
    std::map<Handle, DeviceResource> resources;
};

Descriptors& descriptors() {
    static auto* const instance = new Descriptors;
    return *instance;
}

DeviceResource make_resource(Device device, std::uint32_t multiprocessors, std::uint32_t group_size) {
    DeviceResource resource{};
    resource.type = resource_multiprocessors;
    resource.magic = resource_magic;
    resource.device = device;
    resource.count = multiprocessors;
    resource.partition_min = resource.alignment = group_size;
    return resource;
}

Result store_resource(DeviceResource* output, int type, const DeviceResource& resource) {
    if (output == nullptr) {
        return invalid_value;
    }
    if (type != resource_multiprocessors) {
        return invalid_resource_type;
    }
    *output = resource;
    return success;
}

// The arguments of cuDevSmResourceSplitByCount. `*part_count` is the wanted number of parts, and becomes the actual
// number, or the largest possible number if `parts` is null. `*remaining` receives the multiprocessors that are in no
// part.
struct SplitArguments {
    DeviceResource* parts;
    std::uint32_t* part_count;
    const DeviceResource* input;
    DeviceResource* remaining;
    std::uint32_t flags, multiprocessors_min;
};

Result split_resource(const SplitArguments& split) {
    static std::atomic<std::uint32_t> last_split{0};
    if (split.part_count == nullptr || split.input == nullptr ||
        (split.flags & ~(split_ignore_coscheduling | split_max_cluster_size)) != 0 ||
        (split.parts != nullptr && *split.part_count == 0)) {
        return invalid_value;
    }
    const DeviceResource input = *split.input;
    if (input.type != resource_multiprocessors || input.magic != resource_magic) {
        return invalid_resource_type;
    }
    if (split.multiprocessors_min > input.count) {
        return invalid_value;
    }
    // The sizes are numbers of multiprocessors.
    const std::uint32_t group_size =
        (split.flags & split_ignore_coscheduling) != 0 ? smallest_group_size : coscheduled_group_size;
    const std::uint32_t part_size =
        std::max(group_size, (split.multiprocessors_min + group_size - 1) / group_size * group_size);
    const std::uint32_t possible_part_count = input.count / part_size;
    // A part of a split cannot be split again. The resource of a green context can be split, because sum_resources()
    // sets its split_id to 0.
    if (possible_part_count == 0 || input.split_id != 0) {
        return invalid_resource_configuration;
    }
    const std::uint32_t part_count =
        split.parts == nullptr ? possible_part_count : std::min<std::uint32_t>(*split.part_count, possible_part_count);
    *split.part_count = part_count;
    const std::uint32_t split_id = ++last_split;
    for (std::uint32_t part_index = 0; split.parts != nullptr && part_index < part_count; ++part_index) {
        split.parts[part_index] = make_resource(input.device, part_size, group_size);
        split.parts[part_index].split_id = split_id;
        split.parts[part_index].part_index = part_index;
    }
    if (split.remaining != nullptr) {
        const std::uint32_t remaining_multiprocessors = input.count - part_count * part_size;
        *split.remaining = remaining_multiprocessors == 0
                               ? DeviceResource{}
                               : make_resource(input.device, remaining_multiprocessors, group_size);
        split.remaining->split_id = split_id;
        split.remaining->part_index = part_count;
    }
    return success;
}

// Store the sum of resources in `total`, whose count must be 0 before the call. Several resources must be different
// parts of the same split.
Result sum_resources(std::span<const DeviceResource> resources, DeviceResource* total) {
    std::set<std::uint32_t> part_indices;
    for (const DeviceResource& resource : resources) {
        if (resource.type != resource_multiprocessors || resource.magic != resource_magic) {
            return invalid_resource_type;
        }
        const bool is_of_same_split = resource.split_id != 0 && resource.split_id == resources[0].split_id;
        if (!part_indices.insert(resource.part_index).second || resource.device != resources[0].device ||
            (resources.size() > 1 && !is_of_same_split)) {
            return invalid_resource_configuration;
        }
        total->count += resource.count;
    }
    const DeviceResource& first_resource = resources[0];
    *total = make_resource(first_resource.device, total->count, first_resource.alignment);
    return success;
}

Result create_green_context(Handle* handle, Handle descriptor, Device device, unsigned flags) {
    if (!device_exists(device)) {
        return invalid_device;
    }
    Descriptors& descriptor_table = descriptors();
    DeviceResource resource;
    {
        std::lock_guard lock(descriptor_table.mutex);
        const auto entry = descriptor_table.resources.find(descriptor);
        if (handle == nullptr || flags != green_context_default_stream_flag ||
            entry == descriptor_table.resources.end()) {
            return invalid_value;
        }
        resource = entry->second;
    }
    if (resource.device != device) {
        return invalid_device;
    }
    auto green_context = std::make_shared<GreenContext>();
    green_context->resource = resource;
    *handle = make_handle();
    green_context->context = make_green_context(device, *handle);
    green_contexts().add(*handle, green_context);
    return success;
}

// Run `body` with the green context of a handle.
template <typename Body> Result run_with_green_context(std::string_view symbol, Handle handle, Body&& body) {
    return run_entry(symbol, [&] {
        const auto green_context = green_contexts().find(handle);
        return green_context ? body(*green_context) : invalid_context;
    });
}

} // namespace

std::vector<ContextRef> list_green_contexts(Device device) {
    std::vector<ContextRef> contexts;
    green_contexts().for_each([&](const GreenContext& green_context) {
        if (green_context.context->device == device) {
            contexts.push_back(green_context.context);
        }
    });
    return contexts;
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetDevResource(Device device, DeviceResource* resource, int type) {
    return run_entry("cuDeviceGetDevResource", [&] {
        return device_exists(device)
                   ? store_resource(resource, type, make_resource(device, multiprocessor_count, coscheduled_group_size))
                   : invalid_device;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetDevResource(Handle handle, DeviceResource* resource, int type) {
    return run_entry("cuCtxGetDevResource", [&] {
        ContextRef context;
        if (const Result result = find_context(handle, &context); result != success) {
            return result;
        }
        const auto green_context = green_contexts().find(context->green_context);
        return store_resource(resource, type,
                              green_context
                                  ? green_context->resource
                                  : make_resource(context->device, multiprocessor_count, coscheduled_group_size));
    });
}

GDRKIT_CUDA_ENTRY Result cuGreenCtxGetDevResource(Handle handle, DeviceResource* resource, int type) {
    return run_with_green_context("cuGreenCtxGetDevResource", handle, [&](const GreenContext& green_context) {
        return store_resource(resource, type, green_context.resource);
    });
}

GDRKIT_CUDA_ENTRY Result cuDevSmResourceSplitByCount(DeviceResource* parts, std::uint32_t* part_count,
                                                     const DeviceResource* input, DeviceResource* remaining,
                                                     unsigned flags, unsigned multiprocessors_min) {
    return run_entry("cuDevSmResourceSplitByCount", [&] {
        return split_resource({parts, part_count, input, remaining, flags, multiprocessors_min});
    });
}

GDRKIT_CUDA_ENTRY Result cuDevResourceGenerateDesc(Handle* descriptor, const DeviceResource* resources,
                                                   unsigned resource_count) {
    return run_entry("cuDevResourceGenerateDesc", [&] {
        DeviceResource sum{};
        if (descriptor == nullptr || resources == nullptr || resource_count == 0) {
            return invalid_value;
        }
        const Result result = sum_resources({resources, resource_count}, &sum);
        if (result == success) {
            *descriptor = make_handle();
            std::lock_guard lock(descriptors().mutex);
            descriptors().resources[*descriptor] = sum;
        }
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuGreenCtxCreate(Handle* handle, Handle descriptor, Device device, unsigned flags) {
    return run_entry("cuGreenCtxCreate", [&] { return create_green_context(handle, descriptor, device, flags); });
}

GDRKIT_CUDA_ENTRY Result cuGreenCtxDestroy(Handle handle) {
    return run_entry("cuGreenCtxDestroy", [&] {
        const auto green_context = green_contexts().take(handle);
        if (!green_context) {
            return invalid_context;
        }
        destroy_green_context(green_context->context);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxFromGreenCtx(Handle* context_handle, Handle green_context_handle) {
    return run_with_green_context("cuCtxFromGreenCtx", green_context_handle, [&](const GreenContext& green_context) {
        if (context_handle == nullptr) {
            return invalid_value;
        }
        *context_handle = green_context.context->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuGreenCtxStreamCreate(Handle* stream, Handle handle, unsigned flags, int priority) {
    return run_with_green_context("cuGreenCtxStreamCreate", handle, [&](const GreenContext& green_context) {
        return flags == stream_non_blocking ? create_stream(green_context.context, stream, flags, priority)
                                            : invalid_value;
    });
}

} // namespace gdrkit::twin::cuda
