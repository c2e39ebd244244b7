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

// Groups of compute capability 9.0, whose multiprocessors run the blocks of a cluster at the same time.
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

// The descriptors of resources, which no function destroys.
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
    const std::uint32_t size = std::max(unit, (split.multiprocessors_min + unit - 1) / unit * unit);
    const std::uint32_t possible_count = input.count / size;
    // The result of a split is split again only after it has become a green context.
    if (possible_count == 0 || input.split != 0) {
        return invalid_resource_configuration;
    }
    const std::uint32_t count =
        split.parts == nullptr ? possible_count : std::min<std::uint32_t>(*split.count, possible_count);
    *split.count = count;
    const std::uint32_t number = ++last_split;
    for (std::uint32_t part = 0; split.parts != nullptr && part < count; ++part) {
        split.parts[part] = make_resource(input.device, size, unit);
        split.parts[part].split = number;
        split.parts[part].part = part;
    }
    if (split.remaining != nullptr) {
        const std::uint32_t rest = input.count - count * size;
        *split.remaining = rest == 0 ? DeviceResource{} : make_resource(input.device, rest, unit);
        split.remaining->split = number;
        split.remaining->part = count;
    }
    return success;
}

// Add up resources of one device, and if there are several, of one split.
Result sum_resources(std::span<const DeviceResource> resources, DeviceResource* sum) {
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
        sum->count += resource.count;
    }
    const DeviceResource& first = resources[0];
    *sum = make_resource(first.device, sum->count, first.alignment);
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
    auto green = std::make_shared<GreenContext>();
    green->resource = resource;
    *handle = make_handle();
    green->context = make_green_context(device, *handle);
    green_contexts().add(*handle, green);
    return success;
}

// Run `body` with the green context of a handle.
template <typename Body> Result with_green_context(std::string_view symbol, Handle handle, Body&& body) {
    return run_entry(symbol, [&] {
        const auto green = green_contexts().find(handle);
        return green ? body(*green) : invalid_context;
    });
}

} // namespace

std::vector<ContextRef> list_green_contexts(Device device) {
    std::vector<ContextRef> contexts;
    green_contexts().for_each([&](const GreenContext& green) {
        if (green.context->device == device) {
            contexts.push_back(green.context);
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
        const auto green = green_contexts().find(context->green);
        return store_resource(
            resource, type, green ? green->resource : make_resource(context->device, multiprocessor_count, group_size));
    });
}

GDRKIT_CUDA_ENTRY Result cuGreenCtxGetDevResource(Handle handle, DeviceResource* resource, int type) {
    return with_green_context("cuGreenCtxGetDevResource", handle, [&](const GreenContext& green) {
        return store_resource(resource, type, green.resource);
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
        const auto green = green_contexts().take(handle);
        if (!green) {
            return invalid_context;
        }
        destroy_green_context(green->context);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxFromGreenCtx(Handle* context, Handle handle) {
    return with_green_context("cuCtxFromGreenCtx", handle, [&](const GreenContext& green) {
        if (context == nullptr) {
            return invalid_value;
        }
        *context = green.context->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuGreenCtxStreamCreate(Handle* stream, Handle handle, unsigned flags, int priority) {
    return with_green_context("cuGreenCtxStreamCreate", handle, [&](const GreenContext& green) {
        return flags == stream_non_blocking ? create_stream(green.context, stream, flags, priority) : invalid_value;
    });
}

} // namespace gdrkit::twin::cuda
