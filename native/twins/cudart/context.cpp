// The device and the primary context of a thread, cudaSetDevice and related functions.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "cudart/entry.hpp"
#include "model/gpu.hpp"
#include "model/note.hpp"
#include "model/usage.hpp"

#if GDRKIT_CUDART_MAJOR == 12
GDRKIT_TWIN_NOTE("cuda runtime 12 twin of gdrkit")
#else
GDRKIT_TWIN_NOTE("cuda runtime 13 twin of gdrkit")
#endif

namespace gdrkit::twin::cudart {
namespace {

// The device that this thread selected. The selection has an effect only while the thread has no current context.
thread_local Device selected_device = 0;

// A primary context that the twin has retained. Its handle stays the same if a reset destroys the context and a later
// call creates it again. Only the driver knows whether the context exists, because the program may reset it through the
// driver.
struct PrimaryContext {
    // Each device has a mutex, because a thread holds it while cuDevicePrimaryCtxRetain waits for a reset of the
    // device.
    std::mutex mutex;
    std::atomic<Handle> context{0};
    bool is_retained = false; // true: the twin has retained the context since its last reset
};

// The primary contexts. The index is the ordinal of the device (Device).
std::array<PrimaryContext, max_gpu_count>& primary_contexts() {
    static auto* const instance = new std::array<PrimaryContext, max_gpu_count>;
    return *instance;
}

Error select_device(Device device) {
    Handle context = 0;
    Error error = check_device(device);
    if (error == success) {
        error = get_primary_context(device, &context);
    }
    if (error == success) {
        error = call(&Driver::cuCtxSetCurrent, context);
    }
    if (error == success) {
        selected_device = device;
    }
    return error;
}

bool is_primary_context_active(Device device) {
    unsigned ignored_flags = 0;
    int is_active = 0;
    return call(&Driver::cuDevicePrimaryCtxGetState, device, &ignored_flags, &is_active) == success && is_active != 0;
}

// Return whether the context is a primary context that was reset, by any thread, and store its device.
bool was_reset(Handle context, Device* device) {
    const auto primary_entry = std::ranges::find_if(
        primary_contexts(), [=](const PrimaryContext& primary) { return primary.context.load() == context; });
    const auto ordinal = static_cast<Device>(primary_entry - primary_contexts().begin());
    if (primary_entry == primary_contexts().end() || is_primary_context_active(ordinal)) {
        return false;
    }
    *device = ordinal;
    return true;
}

// Return whether the context is the primary context of the device. The device must have an active primary context,
// because cuDevicePrimaryCtxRetain would create one.
bool is_primary_context_of(Handle context, Device device) {
    Handle primary_handle = 0;
    if (call(&Driver::cuDevicePrimaryCtxRetain, &primary_handle, device) != success) {
        return false;
    }
    call(&Driver::cuDevicePrimaryCtxRelease_v2, device);
    return primary_handle == context;
}

Error reset_device() {
    Device device = 0;
    Handle context = 0;
    find_current_device(&device);
    if (!is_primary_context_active(device)) {
        return success;
    }
    // If the current context is not a primary context, the real function destroys only the state of the runtime for
    // that context. The twin has no such state.
    if (call(&Driver::cuCtxGetCurrent, &context) == success && context != 0 &&
        !is_primary_context_of(context, device)) {
        return success;
    }
    // Another thread may retain the context between the unlock and the reset. That thread notices the reset at its next
    // call.
    {
        PrimaryContext& primary = primary_contexts().at(static_cast<std::size_t>(device));
        std::lock_guard lock(primary.mutex);
        primary.is_retained = false;
    }
    return call(&Driver::cuDevicePrimaryCtxReset_v2, device);
}

} // namespace

Error initialize_driver() {
    static std::atomic<pid_t> initialized_pid{0};
    if (initialized_pid.load(std::memory_order_acquire) == getpid()) {
        return success;
    }
    record_use(GDRKIT_CUDART_MAJOR == 12 ? UsedApi::cuda_runtime_12 : UsedApi::cuda_runtime_13);
    const Error error = call(&Driver::cuInit, 0U);
    if (error == success) {
        initialized_pid.store(getpid(), std::memory_order_release);
    }
    return error;
}

Error check_device(Device device) {
    int count = 0;
    const Error error = call(&Driver::cuDeviceGetCount, &count);
    if (error != success) {
        return error;
    }
    return device >= 0 && device < count ? success : invalid_device;
}

Error get_primary_context(Device device, Handle* context) {
    PrimaryContext& primary = primary_contexts().at(static_cast<std::size_t>(device));
    std::lock_guard lock(primary.mutex);
    if (!primary.is_retained || !is_primary_context_active(device)) {
        Handle retained_context = 0;
        if (const Error error = call(&Driver::cuDevicePrimaryCtxRetain, &retained_context, device); error != success) {
            return error;
        }
        primary.context = retained_context;
        primary.is_retained = true;
    }
    *context = primary.context;
    return success;
}

Error ensure_context() {
    if (const Error error = initialize_driver(); error != success) {
        return error;
    }
    Handle context = 0;
    if (const Error error = call(&Driver::cuCtxGetCurrent, &context); error != success) {
        return error;
    }
    Device device = selected_device;
    return context == 0 || was_reset(context, &device) ? select_device(device) : success;
}

Error find_current_device(Device* device) {
    Handle context = 0;
    *device = selected_device;
    if (call(&Driver::cuCtxGetCurrent, &context) == success && context != 0 && !was_reset(context, device)) {
        Device context_device = 0;
        if (call(&Driver::cuCtxGetDevice, &context_device) == success) {
            *device = context_device;
        }
    }
    return success;
}

GDRKIT_CUDART_ENTRY Error cudaSetDevice(Device device) {
    return run_entry([&] { return select_device(device); });
}

GDRKIT_CUDART_ENTRY Error cudaInitDevice(Device device, unsigned device_flags, unsigned flags) {
    return run_entry([&] {
        if ((flags & ~init_device_flags_are_valid) != 0) {
            return invalid_value;
        }
        Error error = check_device(device);
        if (error == success && flags != 0) {
            error = call(&Driver::cuDevicePrimaryCtxSetFlags_v2, device, device_flags);
        }
        Handle context = 0;
        return error == success ? get_primary_context(device, &context) : error;
    });
}

GDRKIT_CUDART_ENTRY Error cudaGetDevice(Device* device) {
    return run_entry([&] { return device == nullptr ? invalid_value : find_current_device(device); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceReset() {
    return run_entry([] { return reset_device(); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceSynchronize() {
    return call_in_context(&Driver::cuCtxSynchronize);
}

GDRKIT_CUDART_ENTRY Error cudaDeviceSetLimit(int limit, std::size_t value) {
    return call_in_context(&Driver::cuCtxSetLimit, limit, value);
}

GDRKIT_CUDART_ENTRY Error cudaDeviceGetLimit(std::size_t* value, int limit) {
    return call_in_context(&Driver::cuCtxGetLimit, value, limit);
}

GDRKIT_CUDART_ENTRY Error cudaSetDeviceFlags(unsigned flags) {
    return run_entry([&] {
        Device device = 0;
        find_current_device(&device);
        return call(&Driver::cuDevicePrimaryCtxSetFlags_v2, device, flags);
    });
}

GDRKIT_CUDART_ENTRY Error cudaGetDeviceFlags(unsigned* flags) {
    return run_entry([&] {
        Handle context = 0;
        if (flags == nullptr) {
            return invalid_value;
        }
        Device device = selected_device;
        if (call(&Driver::cuCtxGetCurrent, &context) == success && context != 0 && !was_reset(context, &device)) {
            return call(&Driver::cuCtxGetFlags, flags);
        }
        int is_active = 0;
        return call(&Driver::cuDevicePrimaryCtxGetState, device, flags, &is_active);
    });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return call_in_context(&Driver::cuCtxGetStreamPriorityRange, least, greatest);
}

GDRKIT_CUDART_ENTRY Error cudaDeviceFlushGPUDirectRDMAWrites(int target, int scope) {
    return call_in_context(&Driver::cuFlushGPUDirectRDMAWrites, target, scope);
}

GDRKIT_CUDART_ENTRY Error cudaDeviceEnablePeerAccess(Device peer, unsigned flags) {
    return run_entry_in_context([&] {
        Handle peer_context = 0;
        Error error = check_device(peer);
        if (error == success) {
            error = get_primary_context(peer, &peer_context);
        }
        return error == success ? call(&Driver::cuCtxEnablePeerAccess, peer_context, flags) : error;
    });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceDisablePeerAccess(Device peer) {
    return run_entry_in_context([&] {
        Handle peer_context = 0;
        Error error = check_device(peer);
        if (error == success) {
            error = get_primary_context(peer, &peer_context);
        }
        return error == success ? call(&Driver::cuCtxDisablePeerAccess, peer_context) : error;
    });
}

#if GDRKIT_CUDART_MAJOR == 12
GDRKIT_CUDART_ENTRY Error cudaThreadExit() {
    return cudaDeviceReset();
}

GDRKIT_CUDART_ENTRY Error cudaThreadSynchronize() {
    return cudaDeviceSynchronize();
}

GDRKIT_CUDART_ENTRY Error cudaThreadSetLimit(int limit, std::size_t value) {
    return cudaDeviceSetLimit(limit, value);
}

GDRKIT_CUDART_ENTRY Error cudaThreadGetLimit(std::size_t* value, int limit) {
    return cudaDeviceGetLimit(value, limit);
}
#endif

GDRKIT_CUDART_ENTRY Error cudaProfilerStart() {
    return call_in_context(&Driver::cuProfilerStart);
}

GDRKIT_CUDART_ENTRY Error cudaProfilerStop() {
    return call_in_context(&Driver::cuProfilerStop);
}

} // namespace gdrkit::twin::cudart
