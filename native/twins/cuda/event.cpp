// cuEvent*: creating, recording, querying and timing events.

#include "cuda/event.hpp"

#include <chrono>
#include <memory>
#include <mutex>

#include "cuda/capture.hpp"
#include "cuda/entry.hpp"
#include "cuda/registry.hpp"

namespace gdrkit::twin::cuda {
namespace {

struct Event {
    Handle context = 0;
    std::uint32_t flags = 0;
    std::mutex mutex;
    MarkerRef marker;                              // marker of the last record, or null
    std::shared_ptr<CapturedEvent> captured_state; // null unless the last record was in a captured stream
    // The state of an interprocess event, else null. It is set before the event becomes visible to other threads.
    std::shared_ptr<SharedEvent> shared_event;
    bool is_imported = false; // another process has created the event

    void set_record(MarkerRef new_marker, std::shared_ptr<CapturedEvent> new_captured_state) {
        std::lock_guard lock(mutex);
        marker = std::move(new_marker);
        captured_state = std::move(new_captured_state);
    }
    std::shared_ptr<CapturedEvent> get_captured_state() {
        std::lock_guard lock(mutex);
        return captured_state;
    }
    MarkerRef get_recorded_marker() {
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
    if (const Result result = find_stream(stream_handle, context, &stream, CapturePolicy::allow); result != success) {
        return result;
    }
    if (!event) {
        return invalid_handle;
    }
    const bool is_captured_stream = is_captured(stream);
    if (flags != 0 && !(flags == event_record_external && is_captured_stream)) {
        return invalid_value;
    }
    // With event_record_external, the graph gets a node that records the event at each launch.
    if (flags == event_record_external) {
        return capture_node(stream, RecordNode{handle});
    }
    if (is_captured_stream) {
        event->set_record(nullptr, capture_event_record(stream));
        return success;
    }
    if (event->shared_event) {
        // Other processes cannot see a marker, so keep the record in the state that the processes share. The work that
        // is queued here ends the record when the stream reaches it.
        const std::uint32_t record_number = event->shared_event->begin_record();
        try {
            enqueue(
                stream,
                [shared_event = event->shared_event, record_number] { shared_event->end_record(record_number); },
                Timing::immediate);
        } catch (...) {
            event->shared_event->end_record(record_number);
            throw;
        }
        event->set_record(nullptr, nullptr);
        return success;
    }
    event->set_record(enqueue(stream, {}, Timing::immediate), nullptr);
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
    for (const auto& event : {start, end}) {
        if (const auto captured_state = event->get_captured_state()) {
            return refuse_captured_event(*captured_state);
        }
    }
    const MarkerRef start_marker = start->get_recorded_marker(), end_marker = end->get_recorded_marker();
    if (!start_marker || !end_marker) {
        return invalid_handle;
    }
    if (!are_done({start_marker, end_marker})) {
        return not_ready;
    }
    *milliseconds =
        std::chrono::duration<float, std::milli>(get_completion_time(end_marker) - get_completion_time(start_marker))
            .count();
    return success;
}

bool is_done(const EventRecord& record) {
    return record.shared_event ? record.shared_event->is_done(record.record_number)
                               : !record.marker || are_done({record.marker});
}

Handle add_event(const ContextRef& context, std::uint32_t flags, std::shared_ptr<SharedEvent> shared_event,
                 bool is_imported) {
    auto event = std::make_shared<Event>();
    event->context = context->owning_context_handle;
    event->flags = flags;
    event->shared_event = std::move(shared_event);
    event->is_imported = is_imported;
    const Handle handle = make_handle();
    events().add(handle, std::move(event));
    return handle;
}

} // namespace

Result find_record(Handle handle, EventRecord* record) {
    const auto event = events().find(handle);
    if (!event) {
        return invalid_handle;
    }
    record->marker = event->get_recorded_marker();
    record->shared_event = event->shared_event;
    record->record_number = event->shared_event ? event->shared_event->get_last_record_number() : 0;
    record->captured_state = event->get_captured_state();
    return success;
}

bool event_exists(Handle handle) {
    return events().find(handle) != nullptr;
}

std::function<void()> begin_record(Handle handle) {
    const auto event = events().find(handle);
    if (!event) {
        return {};
    }
    if (event->shared_event) {
        event->set_record(nullptr, nullptr);
        return [shared_event = event->shared_event, record_number = event->shared_event->begin_record()] {
            shared_event->end_record(record_number);
        };
    }
    MarkerRef marker = make_marker();
    event->set_record(marker, nullptr);
    return [marker] { complete_marker(marker); };
}

void wait_until_done(const EventRecord& record) {
    if (record.shared_event) {
        record.shared_event->wait_until_done(record.record_number);
    } else if (record.marker) {
        wait_until_done(record.marker);
    }
}

void enqueue_wait(const StreamRef& stream, const EventRecord& record) {
    if (record.shared_event) {
        enqueue(
            stream, [record] { record.shared_event->wait_until_done(record.record_number); }, Timing::immediate);
    } else if (record.marker) {
        enqueue(stream, {}, Timing::immediate, {record.marker});
    }
}

std::shared_ptr<SharedEvent> find_exportable_event(Handle handle) {
    const auto event = events().find(handle);
    return event && !event->is_imported ? event->shared_event : nullptr;
}

Handle add_imported_event(const ContextRef& context, std::shared_ptr<SharedEvent> shared_event) {
    return add_event(context, event_disable_timing | event_interprocess, std::move(shared_event), true);
}

void destroy_context_events(Handle context) {
    events().take_if([=](const Event& event) { return event.context == context; });
}

GDRKIT_CUDA_ENTRY Result cuEventCreate(Handle* handle, unsigned flags) {
    return run_entry_in_context("cuEventCreate", [&](const ContextRef& context) {
        constexpr unsigned known_flags = event_blocking_sync | event_disable_timing | event_interprocess;
        // CUDA does not measure the time of interprocess events.
        const bool is_timed_and_interprocess = (flags & event_interprocess) != 0 && (flags & event_disable_timing) == 0;
        if (handle == nullptr || (flags & ~known_flags) != 0 || is_timed_and_interprocess) {
            return invalid_value;
        }
        std::shared_ptr<SharedEvent> shared_event;
        if ((flags & event_interprocess) != 0) {
            shared_event = SharedEvent::make();
            if (!shared_event) {
                return out_of_memory;
            }
        }
        *handle = add_event(context, flags, std::move(shared_event), false);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventRecord(Handle event, Handle stream) {
    return run_entry_in_context("cuEventRecord",
                                [&](const ContextRef& context) { return record_event(context, event, stream, 0); });
}

GDRKIT_CUDA_ENTRY Result cuEventRecordWithFlags(Handle event, Handle stream, unsigned flags) {
    return run_entry_in_context("cuEventRecordWithFlags",
                                [&](const ContextRef& context) { return record_event(context, event, stream, flags); });
}

GDRKIT_CUDA_ENTRY Result cuEventQuery(Handle handle) {
    return run_entry("cuEventQuery", [&] {
        EventRecord record;
        if (const Result result = find_record(handle, &record); result != success) {
            return result;
        }
        if (record.captured_state) {
            return refuse_captured_event(*record.captured_state);
        }
        if (const Result result = check_captures_permit_call(); result != success) {
            return result;
        }
        return is_done(record) ? success : not_ready;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventSynchronize(Handle handle) {
    return run_entry("cuEventSynchronize", [&] {
        EventRecord record;
        if (const Result result = find_record(handle, &record); result != success) {
            return result;
        }
        if (record.captured_state) {
            return refuse_captured_event(*record.captured_state);
        }
        if (const Result result = check_captures_permit_call(); result != success) {
            return result;
        }
        wait_until_done(record);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuEventDestroy_v2(Handle handle) {
    return run_entry("cuEventDestroy_v2", [&] { return events().take(handle) ? success : invalid_handle; });
}

GDRKIT_CUDA_ENTRY Result cuEventElapsedTime(float* milliseconds, Handle start, Handle end) {
    return run_entry("cuEventElapsedTime", [&] { return query_elapsed_time(milliseconds, start, end); });
}

GDRKIT_CUDA_ENTRY Result cuEventElapsedTime_v2(float* milliseconds, Handle start, Handle end) {
    return run_entry("cuEventElapsedTime_v2", [&] { return query_elapsed_time(milliseconds, start, end); });
}

} // namespace gdrkit::twin::cuda
