// NVML event sets, with which monitoring tools wait for errors of GPUs (GPU events) and for drivers that are bound or
// unbound (system events). Neither happens on the emulated machine, so each wait sleeps until its timeout and returns
// NVML_ERROR_TIMEOUT.

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "nvml/entry.hpp"

namespace gdrkit::twin::nvml {

// An event set. Its address is the handle that the program gets.
struct EventSet {};

namespace {

// The bits of the event types that the twin accepts: nvmlEventTypeXidCriticalError for a GPU, and
// nvmlSystemEventTypeGpuDriverUnbind (1) and nvmlSystemEventTypeGpuDriverBind (2) for the system.
constexpr std::uint64_t xid_error_event = 8, all_system_events = 1 | 2;

struct EventSets {
    std::mutex mutex;
    std::set<std::unique_ptr<EventSet>> sets; // the live ones

    auto find(const EventSet* set) {
        return std::find_if(sets.begin(), sets.end(), [=](const auto& entry) { return entry.get() == set; });
    }
};

EventSets& event_sets() {
    static auto* const instance = new EventSets;
    return *instance;
}

int create_set(EventSet** set) {
    if (set == nullptr) {
        return invalid_argument;
    }
    EventSets& table = event_sets();
    std::lock_guard lock(table.mutex);
    *set = table.sets.insert(std::make_unique<EventSet>()).first->get();
    return success;
}

bool is_event_set(const EventSet* set) {
    EventSets& table = event_sets();
    std::lock_guard lock(table.mutex);
    return table.find(set) != table.sets.end();
}

int free_set(const EventSet* set) {
    EventSets& table = event_sets();
    std::lock_guard lock(table.mutex);
    const auto entry = table.find(set);
    if (entry == table.sets.end()) {
        return invalid_argument;
    }
    table.sets.erase(entry);
    return success;
}

int wait_for_timeout(const EventSet* set, unsigned timeout_ms) {
    if (!is_event_set(set)) {
        return invalid_argument;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(timeout_ms));
    return timeout;
}

// Run the body of a function for system events if the request has version 1 in the encoding of nvml_abi.hpp.
template <typename Request, typename Body> int run_system_entry(Request* request, Body&& body) {
    return run_if_initialized([&]() -> int {
        if (request == nullptr) {
            return invalid_argument;
        }
        return request->version == (sizeof(Request) | 1U << 24) ? body() : argument_version_mismatch;
    });
}

} // namespace

GDRKIT_NVML_ENTRY int nvmlEventSetCreate(EventSet** set) {
    return run_if_initialized([&] { return create_set(set); });
}

GDRKIT_NVML_ENTRY int nvmlEventSetFree(const EventSet* set) {
    return run_if_initialized([&] { return free_set(set); });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetSupportedEventTypes(const Gpu* gpu, std::uint64_t* event_types) {
    return store_constant(gpu, event_types, xid_error_event);
}

GDRKIT_NVML_ENTRY int nvmlDeviceRegisterEvents(const Gpu* gpu, std::uint64_t event_types, const EventSet* set) {
    return run_if_arguments_valid(gpu, set, [&](int) {
        return !is_event_set(set) ? invalid_argument : (event_types & ~xid_error_event) != 0 ? unsupported : success;
    });
}

GDRKIT_NVML_ENTRY int nvmlEventSetWait(const EventSet* set, void*, unsigned timeout_ms) {
    return run_if_initialized([&] { return wait_for_timeout(set, timeout_ms); });
}

GDRKIT_NVML_ENTRY int nvmlEventSetWait_v2(const EventSet* set, void*, unsigned timeout_ms) {
    return run_if_initialized([&] { return wait_for_timeout(set, timeout_ms); });
}

GDRKIT_NVML_ENTRY int nvmlSystemEventSetCreate(SystemEventSetRequest* request) {
    return run_system_entry(request, [&] { return create_set(&request->set); });
}

GDRKIT_NVML_ENTRY int nvmlSystemEventSetFree(SystemEventSetRequest* request) {
    return run_system_entry(request, [&] { return free_set(request->set); });
}

GDRKIT_NVML_ENTRY int nvmlSystemRegisterEvents(SystemEventRegistration* request) {
    return run_system_entry(request, [&]() -> int {
        return is_event_set(request->set) && (request->event_types & ~all_system_events) == 0 ? success
                                                                                              : invalid_argument;
    });
}

GDRKIT_NVML_ENTRY int nvmlSystemEventSetWait(SystemEventWait* request) {
    return run_system_entry(request, [&] {
        request->event_count = 0;
        return wait_for_timeout(request->set, request->timeout_ms);
    });
}

} // namespace gdrkit::twin::nvml
