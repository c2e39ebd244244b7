// The exported cuStream* functions.
#include <algorithm>
#include <utility>

#include "cuda/entry.hpp"
#include "cuda/event.hpp"
#include "cuda/registry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

thread_local bool is_running_host_function = false;
// How calls of this thread affect captures of streams. The twin has no captures, so it only stores the mode.
thread_local int capture_mode = capture_mode_global;

Registry<Stream>& streams() {
    static auto* const instance = new Registry<Stream>("cuda_stream");
    return *instance;
}

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

// Run a host function of a stream. It must not call the driver; check_ready refuses such calls.
template <typename HostFunction> void run_host_function(HostFunction&& function) {
    is_running_host_function = true;
    function();
    is_running_host_function = false;
}

// Run the body of an exported function that takes a stream.
template <typename Body> Result stream_entry(std::string_view symbol, Handle handle, Body&& body) {
    return entry_in_context(symbol, [&](const ContextRef& context) {
        StreamRef stream;
        const Result result = find_stream(handle, context, &stream);
        return result == success ? body(stream) : result;
    });
}

template <typename Value> Result write_result(Value* result, Value value) {
    if (result == nullptr) {
        return invalid_value;
    }
    *result = value;
    return success;
}

} // namespace

bool is_in_host_function() {
    return is_running_host_function;
}

Result find_stream(Handle handle, const ContextRef& context, StreamRef* stream) {
    if (handle == default_stream_handle || handle == legacy_stream_handle) {
        *stream = legacy_stream(context);
        return success;
    }
    if (handle == per_thread_stream_handle) {
        *stream = thread_stream(context);
        return success;
    }
    *stream = streams().find(handle);
    return *stream ? success : invalid_handle;
}

void destroy_streams_of(Handle context) {
    streams().take_all([=](const Stream& stream) {
        const ContextRef owner = stream.context.lock();
        return !owner || owner->handle == context;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamCreate(Handle* handle, unsigned flags) {
    return entry_in_context("cuStreamCreate",
                            [&](const ContextRef& context) { return create_stream(context, handle, flags, 0); });
}

GDRKIT_CUDA_ENTRY Result cuStreamCreateWithPriority(Handle* handle, unsigned flags, int priority) {
    return entry_in_context("cuStreamCreateWithPriority",
                            [&](const ContextRef& context) { return create_stream(context, handle, flags, priority); });
}

GDRKIT_CUDA_ENTRY Result cuStreamDestroy_v2(Handle handle) {
    return entry("cuStreamDestroy_v2", [&] {
        const StreamRef stream = streams().take(handle);
        if (!stream) {
            return invalid_handle;
        }
        close_stream(stream);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamQuery(Handle handle) {
    return stream_entry("cuStreamQuery", handle, [](const StreamRef& stream) {
        return unfinished_markers(stream).empty() ? success : not_ready;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamSynchronize(Handle handle) {
    return stream_entry("cuStreamSynchronize", handle, [](const StreamRef& stream) {
        wait_until_done(unfinished_markers(stream));
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamWaitEvent(Handle handle, Handle event, unsigned flags) {
    return stream_entry("cuStreamWaitEvent", handle, [&](const StreamRef& stream) {
        EventRecord record;
        if (const Result result = find_record(event, &record); result != success) {
            return result;
        }
        if (flags != 0) {
            // CU_EVENT_WAIT_EXTERNAL (1) is used only in graphs, which the twin does not implement.
            return flags == 1 ? not_supported : invalid_value;
        }
        enqueue_wait(stream, record);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamAddCallback(Handle handle, void (*callback)(Handle, Result, void*), void* user,
                                             unsigned flags) {
    return stream_entry("cuStreamAddCallback", handle, [&](const StreamRef& stream) {
        if (callback == nullptr || flags != 0) {
            return invalid_value;
        }
        auto work = [=] { run_host_function([&] { callback(handle, success, user); }); };
        enqueue(stream, work, Timing::delayed);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuLaunchHostFunc(Handle handle, void (*function)(void*), void* user) {
    return stream_entry("cuLaunchHostFunc", handle, [&](const StreamRef& stream) {
        if (function == nullptr) {
            return invalid_value;
        }
        auto work = [=] { run_host_function([&] { function(user); }); };
        enqueue(stream, work, Timing::delayed);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetFlags(Handle handle, unsigned* flags) {
    return stream_entry("cuStreamGetFlags", handle,
                        [&](const StreamRef& stream) { return write_result<unsigned>(flags, stream->flags); });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetPriority(Handle handle, int* priority) {
    return stream_entry("cuStreamGetPriority", handle,
                        [&](const StreamRef& stream) { return write_result<int>(priority, stream->priority); });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetId(Handle handle, std::uint64_t* id) {
    return stream_entry("cuStreamGetId", handle,
                        [&](const StreamRef& stream) { return write_result<std::uint64_t>(id, stream->id); });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetDevice(Handle handle, Device* device) {
    return stream_entry("cuStreamGetDevice", handle,
                        [&](const StreamRef& stream) { return write_result<Device>(device, stream->device); });
}

GDRKIT_CUDA_ENTRY Result cuStreamGetCtx(Handle handle, Handle* context) {
    return stream_entry("cuStreamGetCtx", handle, [&](const StreamRef& stream) {
        const ContextRef owner = stream->context.lock();
        return owner && owner->is_alive ? write_result<Handle>(context, owner->handle) : context_is_destroyed;
    });
}

GDRKIT_CUDA_ENTRY Result cuStreamIsCapturing(Handle handle, int* status) {
    return stream_entry("cuStreamIsCapturing", handle, [&](const StreamRef&) {
        // Streams are captured only into graphs, which the twin does not implement.
        return write_result<int>(status, 0);
    });
}

GDRKIT_CUDA_ENTRY Result cuThreadExchangeStreamCaptureMode(int* mode) {
    return entry("cuThreadExchangeStreamCaptureMode", [&] {
        if (mode == nullptr || *mode < capture_mode_global || *mode > capture_mode_relaxed) {
            return invalid_value;
        }
        std::swap(*mode, capture_mode);
        return success;
    });
}

} // namespace gdrkit::twin::cuda
