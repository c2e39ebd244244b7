// Queries and settings of the current context: cuCtxGetDevice, cuCtxSynchronize, flags, limits and others.
#include "cuda/context.hpp"
#include "cuda/entry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// Every context reports this API version since CUDA 3.2.
constexpr unsigned context_api_version = 3020;

// Return the context of a handle, or the current context if the handle is 0.
Result context_of(Handle handle, const ContextRef& current, ContextRef* context) {
    if (handle == 0) {
        *context = current;
        return success;
    }
    return find_context(handle, context);
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuCtxGetDevice(Device* device) {
    return entry_in_context("cuCtxGetDevice", [&](const ContextRef& context) {
        if (device == nullptr) {
            return invalid_value;
        }
        *device = context->device;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetDevice_v2(Device* device, Handle handle) {
    return entry_in_context("cuCtxGetDevice_v2", [&](const ContextRef& current) {
        ContextRef context;
        if (const Result found = context_of(handle, current, &context); found != success) {
            return found;
        }
        if (device == nullptr) {
            return invalid_value;
        }
        *device = context->device;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxSynchronize() {
    return entry_in_context("cuCtxSynchronize", [](const ContextRef& context) {
        synchronise(context);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxSynchronize_v2(Handle handle) {
    return entry_in_context("cuCtxSynchronize_v2", [&](const ContextRef& current) {
        ContextRef context;
        if (const Result found = context_of(handle, current, &context); found != success) {
            return found;
        }
        synchronise(context);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetFlags(unsigned* flags) {
    return entry_in_context("cuCtxGetFlags", [&](const ContextRef& context) {
        if (flags == nullptr) {
            return invalid_value;
        }
        *flags = context->flags;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxSetFlags(unsigned flags) {
    return entry_in_context("cuCtxSetFlags", [&](const ContextRef& context) {
        if ((flags & ~context_flags_mask) != 0) {
            return invalid_value;
        }
        context->flags = flags | context_map_host;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetId(Handle handle, std::uint64_t* id) {
    return entry("cuCtxGetId", [&] {
        ContextRef context;
        if (handle == 0) {
            if (const Result state = current_context(&context); state != success) {
                return state;
            }
        } else if (const Result found = find_context(handle, &context); found != success) {
            return found;
        }
        if (id == nullptr) {
            return invalid_value;
        }
        *id = context->id;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetApiVersion(Handle handle, unsigned* version) {
    return entry("cuCtxGetApiVersion", [&] {
        ContextRef context;
        if (handle != 0) {
            if (const Result found = find_context(handle, &context); found != success) {
                return found;
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
    return entry_in_context("cuCtxGetStreamPriorityRange", [&](const ContextRef&) {
        if (least != nullptr) {
            *least = min_stream_priority;
        }
        if (greatest != nullptr) {
            *greatest = stream_priority_greatest;
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetLimit(std::size_t* value, int limit) {
    return entry_in_context("cuCtxGetLimit", [&](const ContextRef& context) {
        if (value == nullptr || limit < 0) {
            return invalid_value;
        }
        if (limit >= limit_count) {
            return unsupported_limit;
        }
        *value = context->limits[static_cast<std::size_t>(limit)];
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxSetLimit(int limit, std::size_t value) {
    return entry_in_context("cuCtxSetLimit", [&](const ContextRef& context) {
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
