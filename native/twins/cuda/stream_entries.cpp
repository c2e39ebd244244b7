// The exported cuStream* functions.
#include <algorithm>
#include <utility>

#include "cuda/capture.hpp"
#include "cuda/entry.hpp"
#include "cuda/event.hpp"
#include "cuda/registry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

thread_local bool is_running_host_function = false;

Registry<Stream>& streams() {
    static auto* const instance = new Registry<Stream>("cuda_stream");
    return *instance;
}

// Run a host function of a stream. A host function must not call the driver; check_ready() refuses such calls.
template <typename HostFunction> void run_host_function(HostFunction&& function) {
    is_running_host_function = true;
    function();
    is_running_host_function = false;
}

template <typename Value> Result write_output(Value* output, Value value) {
    if (output == nullptr) {
        return invalid_value;
    }
    *output = value;
    return success;
}

// Find a stream, even if it is captured.
Result find_any_stream(Handle handle, const ContextRef& context, StreamRef* stream) {
    if (handle == default_stream_handle || handle == legacy_stream_handle) {
        *stream = get_legacy_stream(context);
        return success;
    }
    if (handle == per_thread_stream_handle) {
        *stream = get_thread_stream(context);
        return success;
    }
    *stream = streams().find(handle);
    return *stream ? success : invalid_handle;
}

// Run the body of an exported function that takes a stream.
template <typename Body>
Result run_stream_entry(std::string_view symbol, Handle handle, CapturePolicy capture_policy, Body&& body) {
    return run_entry_in_context(symbol, [&](const ContextRef& context) {
        StreamRef stream;
        const Result result = find_stream(handle, context, &stream, capture_policy);
        return result == success ? body(stream) : result;
    });
}

// Store a property of a stream, which may be captured, in *output.
template <typename Value, typename GetProperty>
Result query_stream(std::string_view symbol, Handle handle, Value* output, GetProperty&& get_property) {
    return run_entry_in_context(symbol, [&](const ContextRef& context) {
        StreamRef stream;
        const Result result = find_any_stream(handle, context, &stream);
        return result == success ? write_output<Value>(output, get_property(*stream)) : result;
    });
}

// Run `body` with the context of a stream.
template <typename Body> Result query_stream_context(std::string_view symbol, Handle handle, Body&& body) {
    return run_entry_in_context(symbol, [&](const ContextRef& current_context) {
        StreamRef stream;
        if (const Result result = find_any_stream(handle, current_context, &stream); result != success) {
            return result;
        }
        const ContextRef stream_context = stream->context.lock();
        return stream_context && stream_context->is_alive ? body(*stream_context) : context_is_destroyed;
    });
}

} // namespace

Result create_stream(const ContextRef& context, Handle* handle, unsigned flags, int priority) {
    if (handle == nullptr || (flags & ~static_cast<unsigned>(stream_non_blocking)) != 0) {
        return invalid_value;
    }
    const int valid_priority = std::clamp(priority, greatest_stream_priority, least_stream_priority);
    StreamRef stream = make_stream(context, flags, valid_priority);
    *handle = stream->handle;
    streams().add(stream->handle, stream);
    return success;
}

bool is_in_host_function() {
    return is_running_host_function;
}

std::function<void()> make_host_function_work(void (*function)(void*), void* user_data) {
    return [=] { run_host_function([&] { function(user_data); }); };
}

Result find_stream(Handle handle, const ContextRef& context, StreamRef* stream, CapturePolicy capture_policy) {
    if (const Result result = find_any_stream(handle, context, stream); result != success) {
        return result;
    }
    if (*stream == get_legacy_stream(context)) {
        return refuse_legacy_stream_during_capture(context, capture_policy == CapturePolicy::manage);
    }
    return capture_policy != CapturePolicy::refuse ? success : refuse_captured_stream(*stream);
}

void destroy_context_streams(Handle context) {
    const auto removed_streams = streams().take_if([=](const Stream& stream) {
        const ContextRef stream_context = stream.context.lock();
        return !stream_context || stream_context->handle == context;
    });
    std::ranges::for_each(removed_streams, abandon_capture);
}

GDRKIT_CUDA_ENTRY Result cuStreamCreate(Handle* handle, unsigned flags) {
    return run_entry_in_context("cuStreamCreate",
                                [&](const ContextRef& context) { return create_stream(context, handle, flags, 0); });
}

GDRKIT_CUDA_ENTRY Result cuStreamCreateWithPriority(Handle* handle, unsigned flags, int priority) {
    return run_entry_in_context("cuStreamCreateWithPriority", [&](const ContextRef& context) {
        return create_stream(context, handle, flags, priority);
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamDestroy_v2(Handle handle) {
    return run_entry("cuStreamDestroy_v2", [&] {
        const StreamRef stream = streams().take(handle);
        if (!stream) {
            return invalid_handle;
        }
        abandon_capture(stream);
        close_stream(stream);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamQuery(Handle handle) {
    return run_stream_entry("cuStreamQuery", handle, CapturePolicy::refuse, [](const StreamRef& stream) {
        return list_unfinished_markers(stream).empty() ? success : not_ready;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamSynchronize(Handle handle) {
    return run_stream_entry("cuStreamSynchronize", handle, CapturePolicy::refuse, [](const StreamRef& stream) {
        if (const Result result = check_captures_permit_call(); result != success) {
            return result;
        }
        wait_until_done(list_unfinished_markers(stream));
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamWaitEvent(Handle handle, Handle event, unsigned flags) {
    return run_entry_in_context("cuStreamWaitEvent", [&](const ContextRef& context) {
        StreamRef stream;
        EventRecord record;
        if (const Result result = find_any_stream(handle, context, &stream); result != success) {
            return result;
        }
        if (const Result result = find_record(event, &record); result != success) {
            return result;
        }
        const bool is_external = flags == event_record_external;
        const bool is_captured_stream = is_captured(stream);
        if (flags != 0 && !(is_external && is_captured_stream)) {
            return invalid_value;
        }
        if (is_external) {
            return capture_node(stream, WaitNode{event});
        }
        if (!record.exists()) {
            return success; // also if the stream is captured, as on an H200
        }
        if (record.captured_state || is_captured_stream) {
            return capture_event_wait(context, stream, record.captured_state);
        }
        if (stream == get_legacy_stream(context)) {
            if (const Result result = refuse_legacy_stream_during_capture(context); result != success) {
                return result;
            }
        }
        enqueue_wait(stream, record);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamAddCallback(Handle handle, void (*callback)(Handle, Result, void*), void* user_data,
                                             unsigned flags) {
    // Wrong arguments do not invalidate a capture, so they are checked before the stream.
    const bool has_wrong_arguments = callback == nullptr || flags != 0;
    const CapturePolicy capture_policy = has_wrong_arguments ? CapturePolicy::allow : CapturePolicy::refuse;
    return run_stream_entry("cuStreamAddCallback", handle, capture_policy, [&](const StreamRef& stream) {
        if (has_wrong_arguments) {
            return invalid_value;
        }
        auto work = [=] { run_host_function([&] { callback(handle, success, user_data); }); };
        enqueue(stream, work, Timing::delayed);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuLaunchHostFunc(Handle handle, void (*function)(void*), void* user_data) {
    return run_stream_entry("cuLaunchHostFunc", handle, CapturePolicy::allow, [&](const StreamRef& stream) {
        if (function == nullptr) {
            return invalid_value;
        }
        if (is_captured(stream)) {
            return capture_node(stream, HostParameters{function, user_data});
        }
        enqueue(stream, make_host_function_work(function, user_data), Timing::delayed);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetFlags(Handle handle, unsigned* flags) {
    return query_stream("cuStreamGetFlags", handle, flags, [](const Stream& stream) { return stream.flags; });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetPriority(Handle handle, int* priority) {
    return query_stream("cuStreamGetPriority", handle, priority, [](const Stream& stream) { return stream.priority; });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetId(Handle handle, std::uint64_t* id) {
    return query_stream("cuStreamGetId", handle, id, [](const Stream& stream) { return stream.id; });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetDevice(Handle handle, Device* device) {
    return query_stream("cuStreamGetDevice", handle, device, [](const Stream& stream) { return stream.device; });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetCtx(Handle handle, Handle* context) {
    return query_stream_context("cuStreamGetCtx", handle, [&](const Context& stream_context) {
        return write_output<Handle>(context, stream_context.handle);
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetCtx_v2(Handle handle, Handle* context, Handle* green_context) {
    return query_stream_context("cuStreamGetCtx_v2", handle, [&](const Context& stream_context) {
        if (context == nullptr || green_context == nullptr) {
            return invalid_value;
        }
        *context = stream_context.owning_context_handle;
        *green_context = stream_context.green_context;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetGreenCtx(Handle handle, Handle* green_context) {
    return query_stream_context("cuStreamGetGreenCtx", handle, [&](const Context& stream_context) {
        return write_output<Handle>(green_context, stream_context.green_context);
    });
}

} // namespace gdrkit::twin::cuda
