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

// Sizes of a group of multiprocessors that can run the blocks of a cluster at the same time, for compute capability
// 9.0.
constexpr std::uint32_t group_size = 8, smallest_group_size = 2;
constexpr std::uint32_t resource_magic = 0x6d73; // "sm"

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
    std::map<Handle, DeviceResource> all;
};

Descriptors& descriptors() {
    static auto* const instance = new Descriptors;
    return *instance;
}

DeviceResource make_resource(Device device, std::uint32_t count, std::uint32_t unit) {
    DeviceResource resource{};
    resource.type = resource_multiprocessors;
    resource.magic = resource_magic;
    resource.device = device;
    resource.count = count;
    resource.partition_min = resource.alignment = unit;
    return resource;
}

Result store_resource(DeviceResource* result, int type, const DeviceResource& resource) {
    if (result == nullptr) {
        return invalid_value;
    }
    if (type != resource_multiprocessors) {
        return invalid_resource_type;
    }
    *result = resource;
    return success;
}

struct Split {
    DeviceResource* parts;
    std::uint32_t* count;
    const DeviceResource* input;
    DeviceResource* remaining;
    std::uint32_t flags, multiprocessors_min;
};

Result split_resource(const Split& split) {
    static std::atomic<std::uint32_t> last_split{0};
    if (split.count == nullptr || split.input == nullptr ||
        (split.flags & ~(split_ignore_coscheduling | split_max_cluster_size)) != 0 ||
        (split.parts != nullptr && *split.count == 0)) {
        return invalid_value;
    }
    const DeviceResource input = *split.input;
    if (input.type != resource_multiprocessors || input.magic != resource_magic) {
        return invalid_resource_type;
    }
    if (split.multiprocessors_min > input.count) {
        return invalid_value;
    }
    const std::uint32_t unit = (split.flags & split_ignore_coscheduling) != 0 ? smallest_group_size : group_size;
    const std::uint32_t part_size = std::max(unit, (split.multiprocessors_min + unit - 1) / unit * unit);
    const std::uint32_t possible_count = input.count / part_size;
    // A part of a split (`split` is not 0) cannot be split again, but the resource of a green context can.
    if (possible_count == 0 || input.split != 0) {
        return invalid_resource_configuration;
    }
    const std::uint32_t count =
        split.parts == nullptr ? possible_count : std::min<std::uint32_t>(*split.count, possible_count);
    *split.count = count;
    const std::uint32_t split_number = ++last_split;
    for (std::uint32_t part = 0; split.parts != nullptr && part < count; ++part) {
        split.parts[part] = make_resource(input.device, part_size, unit);
        split.parts[part].split = split_number;
        split.parts[part].part = part;
    }
    if (split.remaining != nullptr) {
        const std::uint32_t remaining_count = input.count - count * part_size;
        *split.remaining = remaining_count == 0 ? DeviceResource{} : make_resource(input.device, remaining_count, unit);
        split.remaining->split = split_number;
        split.remaining->part = count;
    }
    return success;
}

// Add up resources. All must belong to the same device and, if there are several, to the same split.
Result sum_resources(std::span<const DeviceResource> resources, DeviceResource* total) {
    std::set<std::uint32_t> parts;
    for (const DeviceResource& resource : resources) {
        if (resource.type != resource_multiprocessors || resource.magic != resource_magic) {
            return invalid_resource_type;
        }
        const bool is_of_same_split = resource.split != 0 && resource.split == resources[0].split;
        if (!parts.insert(resource.part).second || resource.device != resources[0].device ||
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
    Descriptors& state = descriptors();
    DeviceResource resource;
    {
        std::lock_guard lock(state.mutex);
        const auto entry = state.all.find(descriptor);
        if (handle == nullptr || flags != green_context_default_stream_flag || entry == state.all.end()) {
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
                   ? store_resource(resource, type, make_resource(device, multiprocessor_count, group_size))
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
                              green_context ? green_context->resource
                                            : make_resource(context->device, multiprocessor_count, group_size));
    });
}

GDRKIT_CUDA_ENTRY Result cuGreenCtxGetDevResource(Handle handle, DeviceResource* resource, int type) {
    return run_with_green_context("cuGreenCtxGetDevResource", handle, [&](const GreenContext& green_context) {
        return store_resource(resource, type, green_context.resource);
    });
}

GDRKIT_CUDA_ENTRY Result cuDevSmResourceSplitByCount(DeviceResource* parts, std::uint32_t* count,
                                                     const DeviceResource* input, DeviceResource* remaining,
                                                     unsigned flags, unsigned multiprocessors_min) {
    return run_entry("cuDevSmResourceSplitByCount", [&] {
        return split_resource({parts, count, input, remaining, flags, multiprocessors_min});
    });
}

GDRKIT_CUDA_ENTRY Result cuDevResourceGenerateDesc(Handle* descriptor, const DeviceResource* resources,
                                                   unsigned count) {
    return run_entry("cuDevResourceGenerateDesc", [&] {
        DeviceResource sum{};
        if (descriptor == nullptr || resources == nullptr || count == 0) {
            return invalid_value;
        }
        const Result result = sum_resources({resources, count}, &sum);
        if (result == success) {
            *descriptor = make_handle();
            std::lock_guard lock(descriptors().mutex);
            descriptors().all[*descriptor] = sum;
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

GDRKIT_CUDA_ENTRY Result cuCtxFromGreenCtx(Handle* context, Handle handle) {
    return run_with_green_context("cuCtxFromGreenCtx", handle, [&](const GreenContext& green_context) {
        if (context == nullptr) {
            return invalid_value;
        }
        *context = green_context.context->handle;
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
