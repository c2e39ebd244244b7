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
    MarkerRef marker; // of the last record of the event, or null
    // The state of an interprocess event, else null. It is set before the event becomes visible to other threads.
    std::shared_ptr<SharedEvent> shared;
    bool is_imported = false; // another process has made the event

    MarkerRef recorded_marker() {
        std::lock_guard lock(mutex);
        return marker;
    }
};

Registry<Event>& events() {
    static auto* const instance = new Registry<Event>("cuda_event");
    return *instance;
}

Result record_event(const ContextRef& context, Handle handle, Handle stream_handle, unsigned flags) {
    const auto event = events().find(handle);
    StreamRef stream;
    if (const Result result = find_stream(stream_handle, context, &stream); result != success) {
        return result;
    }
    if (!event) {
        return invalid_handle;
    }
    if (flags != 0) {
        // External records are used only in graphs, which the twin does not implement.
        return flags == event_record_external ? not_supported : invalid_value;
    }
    if (event->shared) {
        const std::uint32_t number = event->shared->begin_record();
        try {
            enqueue(
                stream, [shared = event->shared, number] { shared->end_record(number); }, Timing::immediate);
        } catch (...) {
            event->shared->end_record(number);
            throw;
        }
        return success;
    }
    MarkerRef marker = enqueue(stream, {}, Timing::immediate);
    std::lock_guard lock(event->mutex);
    event->marker = std::move(marker);
    return success;
}

Result query_elapsed_time(float* milliseconds, Handle start_handle, Handle end_handle) {
    if (milliseconds == nullptr) {
        return invalid_value;
    }
    const auto start = events().find(start_handle);
    const auto end = events().find(end_handle);
    if (!start || !end || ((start->flags | end->flags) & event_disable_timing) != 0) {
        return invalid_handle;
    }
    const MarkerRef start_marker = start->recorded_marker(), end_marker = end->recorded_marker();
    if (!start_marker || !end_marker) {
        return invalid_handle;
    }
    if (!are_done({start_marker, end_marker})) {
        return not_ready;
    }
    *milliseconds =
        std::chrono::duration<float, std::milli>(completion_time_of(end_marker) - completion_time_of(start_marker))
            .count();
    return success;
}

bool is_done(const EventRecord& record) {
    return record.shared ? record.shared->is_done(record.number) : !record.marker || are_done({record.marker});
}

void wait_until_done(const EventRecord& record) {
    if (record.shared) {
        record.shared->wait_until_done(record.number);
    } else if (record.marker) {
        wait_until_done(record.marker);
    }
}

Handle add_event(const ContextRef& context, std::uint32_t flags, std::shared_ptr<SharedEvent> shared,
                 bool is_imported) {
    auto event = std::make_shared<Event>();
    event->context = context->handle;
    event->flags = flags;
    event->shared = std::move(shared);
    event->is_imported = is_imported;
    const Handle handle = new_handle();
    events().add(handle, std::move(event));
    return handle;
}

} // namespace

Result find_record(Handle handle, EventRecord* record) {
    const auto event = events().find(handle);
    if (!event) {
        return invalid_handle;
    }
    record->marker = event->recorded_marker();
    record->shared = event->shared;
    record->number = event->shared ? event->shared->last_record() : 0;
    return success;
}

void enqueue_wait(const StreamRef& stream, const EventRecord& record) {
    if (record.shared) {
        enqueue(
            stream, [record] { record.shared->wait_until_done(record.number); }, Timing::immediate);
    } else if (record.marker) {
        enqueue(stream, {}, Timing::immediate, {record.marker});
    }
}

std::shared_ptr<SharedEvent> find_exportable(Handle handle) {
    const auto event = events().find(handle);
    return event && !event->is_imported ? event->shared : nullptr;
}

Handle add_imported(const ContextRef& context, std::shared_ptr<SharedEvent> shared) {
    return add_event(context, event_disable_timing | event_interprocess, std::move(shared), true);
}

void destroy_events_of(Handle context) {
    events().take_all([=](const Event& event) { return event.context == context; });
}

GDRKIT_CUDA_ENTRY Result cuEventCreate(Handle* handle, unsigned flags) {
    return entry_in_context("cuEventCreate", [&](const ContextRef& context) {
        constexpr unsigned known_flags = event_blocking_sync | event_disable_timing | event_interprocess;
        const bool is_timed_and_interprocess = (flags & event_interprocess) != 0 && (flags & event_disable_timing) == 0;
        if (handle == nullptr || (flags & ~known_flags) != 0 || is_timed_and_interprocess) {
            return invalid_value;
        }
        std::shared_ptr<SharedEvent> shared;
        if ((flags & event_interprocess) != 0) {
            shared = SharedEvent::make();
            if (!shared) {
                return out_of_memory;
            }
        }
        *handle = add_event(context, flags, std::move(shared), false);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventRecord(Handle event, Handle stream) {
    return entry_in_context("cuEventRecord",
                            [&](const ContextRef& context) { return record_event(context, event, stream, 0); });
}

GDRKIT_CUDA_ENTRY Result cuEventRecordWithFlags(Handle event, Handle stream, unsigned flags) {
    return entry_in_context("cuEventRecordWithFlags",
                            [&](const ContextRef& context) { return record_event(context, event, stream, flags); });
}

GDRKIT_CUDA_ENTRY Result cuEventQuery(Handle handle) {
    return entry("cuEventQuery", [&] {
        EventRecord record;
        if (const Result result = find_record(handle, &record); result != success) {
            return result;
        }
        return is_done(record) ? success : not_ready;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventSynchronize(Handle handle) {
    return entry("cuEventSynchronize", [&] {
        EventRecord record;
        if (const Result result = find_record(handle, &record); result != success) {
            return result;
        }
        wait_until_done(record);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventDestroy_v2(Handle handle) {
    return entry("cuEventDestroy_v2", [&] { return events().take(handle) ? success : invalid_handle; });
}

GDRKIT_CUDA_ENTRY Result cuEventElapsedTime(float* milliseconds, Handle start, Handle end) {
    return entry("cuEventElapsedTime", [&] { return query_elapsed_time(milliseconds, start, end); });
}

GDRKIT_CUDA_ENTRY Result cuEventElapsedTime_v2(float* milliseconds, Handle start, Handle end) {
    return entry("cuEventElapsedTime_v2", [&] { return query_elapsed_time(milliseconds, start, end); });
}

} // namespace gdrkit::twin::cuda
