// Events: each refers to the point in a stream at which it was last recorded.
#pragma once

#include <memory>

#include "cuda/cuda_abi.hpp"
#include "cuda/shared_event.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {

// The last record of an event.
struct EventRecord {
    MarkerRef marker;                    // null if the event was never recorded, or is an interprocess event
    std::shared_ptr<SharedEvent> shared; // null unless the event is an interprocess event
    std::uint32_t number = 0;            // of the record, in `shared`
};

// Find the last record of the event with this handle. Fails with invalid_handle.
Result find_record(Handle event, EventRecord* record);

// Queue in a stream a wait for the record.
void enqueue_wait(const StreamRef& stream, const EventRecord& record);

// Return the state of an interprocess event that this process has made, else null.
std::shared_ptr<SharedEvent> find_exportable(Handle event);

// Add an event of another process and return its handle.
Handle add_imported(const ContextRef& context, std::shared_ptr<SharedEvent> shared);

// Destroy all events of a context that ends.
void destroy_events_of(Handle context);

} // namespace gdrkit::twin::cuda
