// Queries and settings of the current context: cuCtxGetDevice, cuCtxSynchronize, flags, limits and others.
#include "cuda/capture.hpp"
#include "cuda/context.hpp"
#include "cuda/entry.hpp"
#include "cuda/green_context.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// API version that every context reports. It has not changed since CUDA 3.2.
constexpr unsigned context_api_version = 3020;

// Find the context of a handle, or the current context if the handle is 0.
Result find_context_or_current(Handle handle, const ContextRef& current, ContextRef* context) {
    if (handle == 0) {
        *context = current;
        return success;
    }
    return find_context(handle, context);
}

// Wait for all queued work of a context. For a primary context, wait also for the green contexts of its device. If a
// stream of the context is being captured, invalidate the capture and fail with stream_capture_unsupported.
Result wait_for_context(const ContextRef& context) {
    const Result result = refuse_synchronize_during_capture(context);
    if (result == success) {
        synchronise(context);
        for (const ContextRef& green_context :
             context->is_primary ? list_green_contexts(context->device) : std::vector<ContextRef>()) {
            synchronise(green_context);
        }
    }
    return result;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuCtxGetDevice(Device* device) {
    return run_entry_in_context("cuCtxGetDevice", [&](const ContextRef& context) {
        if (device == nullptr) {
            return invalid_value;
        }
        *device = context->device;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetDevice_v2(Device* device, Handle handle) {
    return run_entry_in_context("cuCtxGetDevice_v2", [&](const ContextRef& current) {
        ContextRef context;
        if (const Result result = find_context_or_current(handle, current, &context); result != success) {
            return result;
        }
        if (device == nullptr) {
            return invalid_value;
        }
        *device = context->device;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxSynchronize() {
    return run_entry_in_context("cuCtxSynchronize",
                                [](const ContextRef& context) { return wait_for_context(context); });
}

GDRKIT_CUDA_ENTRY Result cuCtxSynchronize_v2(Handle handle) {
    return run_entry_in_context("cuCtxSynchronize_v2", [&](const ContextRef& current) {
        ContextRef context;
        if (const Result result = find_context_or_current(handle, current, &context); result != success) {
            return result;
        }
        return wait_for_context(context);
    });
}

// No profiler observes the twin, so there is nothing to start and to stop.
GDRKIT_CUDA_ENTRY Result cuProfilerStart() {
    return run_entry_in_context("cuProfilerStart", [](const ContextRef&) { return success; });
}

GDRKIT_CUDA_ENTRY Result cuProfilerStop() {
    return run_entry_in_context("cuProfilerStop", [](const ContextRef&) { return success; });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetFlags(unsigned* flags) {
    return run_entry_in_context("cuCtxGetFlags", [&](const ContextRef& context) {
        if (flags == nullptr) {
            return invalid_value;
        }
        *flags = context->flags;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxSetFlags(unsigned flags) {
    return run_entry_in_context("cuCtxSetFlags", [&](const ContextRef& context) {
        if (!is_valid_context_flags(flags)) {
            return invalid_value;
        }
        context->flags = flags | context_map_host;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetId(Handle handle, std::uint64_t* id) {
    return run_entry("cuCtxGetId", [&] {
        ContextRef context;
        if (handle == 0) {
            if (const Result result = find_current_context(&context); result != success) {
                return result;
            }
        } else if (const Result result = find_context(handle, &context); result != success) {
            return result;
        }
        if (id == nullptr) {
            return invalid_value;
        }
        *id = context->id;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetApiVersion(Handle handle, unsigned* version) {
    return run_entry("cuCtxGetApiVersion", [&] {
        ContextRef context;
        if (handle != 0) {
            if (const Result result = find_context(handle, &context); result != success) {
                return result;
            }
        }
        if (version == nullptr) {
            return invalid_value;
        }
        *version = context_api_version;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return run_entry_in_context("cuCtxGetStreamPriorityRange", [&](const ContextRef&) {
        if (least != nullptr) {
            *least = least_stream_priority;
        }
        if (greatest != nullptr) {
            *greatest = greatest_stream_priority;
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetLimit(std::size_t* value, int limit) {
    return run_entry_in_context("cuCtxGetLimit", [&](const ContextRef& context) {
        if (value == nullptr || limit < 0 || limit >= limit_count) {
            return invalid_value;
        }
        *value = context->limits[static_cast<std::size_t>(limit)];
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxSetLimit(int limit, std::size_t value) {
    return run_entry_in_context("cuCtxSetLimit", [&](const ContextRef& context) {
        if (limit < 0) {
            return invalid_value;
        }
        if (limit >= limit_count) {
            return unsupported_limit;
        }
        context->limits[static_cast<std::size_t>(limit)] = value;
        return success;
    });
}

} // namespace gdrkit::twin::cuda
