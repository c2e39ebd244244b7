// cuEvent*: creating, recording, querying and timing events.

#include "cuda/event.hpp"

#include <chrono>
#include <memory>
#include <mutex>

#include "cuda/entry.hpp"
#include "cuda/registry.hpp"

namespace gdrkit::twin::cuda {
namespace {

struct Event {
    Handle context = 0;
    std::uint32_t flags = 0;
    std::mutex mutex;
    MarkerRef recorded;

    MarkerRef get() {
        std::lock_guard lock(mutex);
        return recorded;
    }
};

Registry<Event>& events() {
    static auto* const all = new Registry<Event>("cuda_event");
    return *all;
}

Result record(const ContextRef& context, Handle handle, Handle stream_handle, unsigned flags) {
    const auto event = events().find(handle);
    StreamRef stream;
    if (const Result found = find_stream(stream_handle, context, &stream); found != success) {
        return found;
    }
    if (!event) {
        return invalid_handle;
    }
    if (flags != 0) {
        // External records are only used in graphs, which the twin does not implement.
        return flags == event_record_external ? not_supported : invalid_value;
    }
    MarkerRef marker = enqueue(stream, {}, Timing::immediate);
    std::lock_guard lock(event->mutex);
    event->recorded = std::move(marker);
    return success;
}

Result elapsed(float* milliseconds, Handle start_handle, Handle end_handle) {
    if (milliseconds == nullptr) {
        return invalid_value;
    }
    const auto start = events().find(start_handle);
    const auto end = events().find(end_handle);
    if (!start || !end || ((start->flags | end->flags) & event_disable_timing) != 0) {
        return invalid_handle;
    }
    const MarkerRef from = start->get(), to = end->get();
    if (!from || !to) {
        return invalid_handle;
    }
    if (!all_complete({from, to})) {
        return not_ready;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(completion_time_of(to) - completion_time_of(from)).count();
    return success;
}

} // namespace

Result find_recorded_marker(Handle handle, MarkerRef* marker) {
    const auto event = events().find(handle);
    if (!event) {
        return invalid_handle;
    }
    *marker = event->get();
    return success;
}

void destroy_events_of(Handle context) {
    events().take_all([=](const Event& event) { return event.context == context; });
}

GDRKIT_CUDA_ENTRY Result cuEventCreate(Handle* handle, unsigned flags) {
    return entry_in_context("cuEventCreate", [&](const ContextRef& context) {
        constexpr unsigned known = event_blocking_sync | event_disable_timing | event_interprocess;
        const bool times_between_processes = (flags & event_interprocess) != 0 && (flags & event_disable_timing) == 0;
        if (handle == nullptr || (flags & ~known) != 0 || times_between_processes) {
            return invalid_value;
        }
        if ((flags & event_interprocess) != 0) {
            return not_supported;
        }
        auto event = std::make_shared<Event>();
        event->context = context->handle;
        event->flags = flags;
        const Handle created = new_handle();
        events().add(created, std::move(event));
        *handle = created;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventRecord(Handle event, Handle stream) {
    return entry_in_context("cuEventRecord",
                            [&](const ContextRef& context) { return record(context, event, stream, 0); });
}

GDRKIT_CUDA_ENTRY Result cuEventRecordWithFlags(Handle event, Handle stream, unsigned flags) {
    return entry_in_context("cuEventRecordWithFlags",
                            [&](const ContextRef& context) { return record(context, event, stream, flags); });
}

GDRKIT_CUDA_ENTRY Result cuEventQuery(Handle handle) {
    return entry("cuEventQuery", [&] {
        MarkerRef marker;
        if (const Result found = find_recorded_marker(handle, &marker); found != success) {
            return found;
        }
        return !marker || all_complete({marker}) ? success : not_ready;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventSynchronize(Handle handle) {
    return entry("cuEventSynchronize", [&] {
        MarkerRef marker;
        if (const Result found = find_recorded_marker(handle, &marker); found != success) {
            return found;
        }
        if (marker) {
            wait_until_done(marker);
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventDestroy_v2(Handle handle) {
    return entry("cuEventDestroy_v2", [&] { return events().take(handle) ? success : invalid_handle; });
}

GDRKIT_CUDA_ENTRY Result cuEventElapsedTime(float* milliseconds, Handle start, Handle end) {
    return entry("cuEventElapsedTime", [&] { return elapsed(milliseconds, start, end); });
}

GDRKIT_CUDA_ENTRY Result cuEventElapsedTime_v2(float* milliseconds, Handle start, Handle end) {
    return entry("cuEventElapsedTime_v2", [&] { return elapsed(milliseconds, start, end); });
}

} // namespace gdrkit::twin::cuda
