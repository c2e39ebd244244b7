// CUDA IPC of events: handles of interprocess events.

#include "cuda/entry.hpp"
#include "cuda/event.hpp"
#include "cuda/ipc_handle.hpp"

namespace gdrkit::twin::cuda {
namespace {

// Handle the request of a process that opens an IPC handle of an event: reply with one byte and a descriptor of the
// event's state. The reply has no descriptor if the event was destroyed.
void serve_event(std::span<const std::byte> request, std::vector<std::byte>* reply, std::vector<Fd>* fds) {
    Handle event = 0;
    if (request.size() != sizeof event) {
        return;
    }
    std::memcpy(&event, request.data(), sizeof event);
    reply->resize(1);
    if (const auto shared_event = find_exportable_event(event)) {
        if (Fd fd = reopen(shared_event->fd())) {
            fds->push_back(std::move(fd));
        }
    }
}

Result open_event(const ContextRef& context, const IpcHandle& handle, Handle* event) {
    HandleMessage message{};
    if (event == nullptr) {
        return invalid_value;
    }
    if (!read_handle(event_magic, handle, &message)) {
        return map_failed;
    }
    if (message.owner_service_id == read_control_service_id()) {
        return invalid_context;
    }
    std::vector<std::byte> request(sizeof message.object_id), reply;
    std::memcpy(request.data(), &message.object_id, sizeof message.object_id);
    std::vector<Fd> fds;
    if (!send_control_request(message.owner_service_id, cuda_ipc_event_request, request, &reply, &fds)) {
        return invalid_handle;
    }
    auto shared_event = fds.size() == 1 ? SharedEvent::adopt(std::move(fds[0])) : nullptr;
    if (!shared_event) {
        return invalid_value;
    }
    *event = add_imported_event(context, std::move(shared_event));
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuIpcGetEventHandle(IpcHandle* handle, Handle event) {
    return run_entry_in_context("cuIpcGetEventHandle", [&](const ContextRef&) {
        if (handle == nullptr) {
            return invalid_value;
        }
        if (!find_exportable_event(event)) {
            return invalid_handle;
        }
        // Do not use std::call_once(): this library would then refer to thread-local variables of libstdc++. It is
        // built with the initial-exec TLS model, so these variables must be in static TLS. They are not in static TLS
        // if dlopen() has loaded libstdc++.
        [[maybe_unused]] static const bool is_registered = [] {
            register_handler(cuda_ipc_event_request, serve_event);
            return true;
        }();
        HandleMessage message{};
        message.object_id = event;
        write_handle(event_magic, message, handle);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuIpcOpenEventHandle(Handle* event, IpcHandle handle) {
    return run_entry_in_context("cuIpcOpenEventHandle",
                                [&](const ContextRef& context) { return open_event(context, handle, event); });
}

} // namespace gdrkit::twin::cuda
