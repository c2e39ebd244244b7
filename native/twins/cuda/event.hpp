// CUDA events. Each event refers to the point in a stream at which it was last recorded.
#pragma once

#include <functional>
#include <memory>

#include "cuda/cuda_abi.hpp"
#include "cuda/shared_event.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {

struct CapturedEvent;

// The last record of an event.
struct EventRecord {
    MarkerRef marker; // null if there is no record, or if `shared_event` or `captured_state` is set
    std::shared_ptr<SharedEvent> shared_event;     // null unless the event is an interprocess event
    std::uint32_t record_number = 0;               // number of the record in `shared_event`; 0 if there is none
    std::shared_ptr<CapturedEvent> captured_state; // null unless the event was last recorded in a captured stream

    [[nodiscard]] bool exists() const { return marker != nullptr || record_number != 0 || captured_state != nullptr; }
};

// Find the last record of the event with this handle, or fail with invalid_handle.
Result find_record(Handle event, EventRecord* record);

bool event_exists(Handle event);

// Begin a record of an event. The record is done when the caller calls the returned function. If the event does not
// exist, return an empty function.
std::function<void()> begin_record(Handle event);

// Wait until the record is done. Return at once if the event was never recorded.
void wait_until_done(const EventRecord& record);

// Make the later work of a stream wait for the record.
void enqueue_wait(const StreamRef& stream, const EventRecord& record);

// Return the state of an interprocess event that this process has created, else null.
std::shared_ptr<SharedEvent> find_exportable_event(Handle event);

// Add an event of another process and return its handle.
Handle add_imported_event(const ContextRef& context, std::shared_ptr<SharedEvent> shared_event);

// Destroy all events of a context that ends.
void destroy_context_events(Handle context);

} // namespace gdrkit::twin::cuda
