// Contexts: primary contexts, cuCtxCreate, the stack of current contexts of each thread, and peer access.

#include "cuda/context.hpp"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "cuda/array.hpp"
#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/event.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "cuda/texture.hpp"
#include "model/config.hpp"
#include "model/ledger.hpp"

namespace gdrkit::twin::cuda {
namespace {

// These are the names under which the ledger of live handles counts contexts.
constexpr std::string_view ledger_kind = "cuda_context";
constexpr std::string_view primary_ledger_kind = "cuda_primary_context";

struct PrimaryContext {
    ContextRef context;
    std::uint64_t reference_count = 0;
    std::uint32_t flags = 0;
    bool is_ending = false; // a thread is destroying the contents; calls that retain or release the context wait
};

struct Contexts {
    std::mutex mutex;
    std::condition_variable context_ended; // notified when the end of a primary context is complete
    std::map<Handle, ContextRef> live_contexts;
    std::map<Device, PrimaryContext> primary_contexts;
    std::set<std::pair<Handle, Handle>> peer_accesses; // {context, peer context that it may access}
    std::uint64_t last_context_id = 0;
};

Contexts& contexts() {
    static auto* const instance = new Contexts;
    return *instance;
}

// The context stack of one thread. When the thread ends, the stack is emptied but not destroyed: after this,
// destructors of static objects may still call the driver in the main thread, and then use the stack. The union
// prevents the destruction of the vector.
struct ThreadStack {
    union {
        std::vector<ContextRef> contexts;
    };
    ThreadStack() : contexts() {}
    ~ThreadStack() { std::vector<ContextRef>().swap(contexts); }
};

std::vector<ContextRef>& thread_stack() {
    thread_local ThreadStack stack;
    return stack.contexts;
}

// Initial limits as observed on an H200, in the order of CUlimit: stack size, printf buffer and malloc heap in bytes;
// synchronisation depth and pending launches of the device runtime; L2 fetch granularity in bytes. The last four
// limits, for the persisting L2 cache and for CUDA in Graphics, are 0.
constexpr std::uint64_t default_limits[limit_count] = {1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0, 0, 0};

ContextRef make_context_locked(Contexts* all_contexts, Device device, std::uint32_t flags) {
    auto context = std::make_shared<Context>();
    context->handle = context->owning_context_handle = make_handle();
    context->id = ++all_contexts->last_context_id;
    context->device = device;
    context->flags = flags | context_map_host;
    for (int limit = 0; limit < limit_count; ++limit) {
        context->limits[static_cast<std::size_t>(limit)] = default_limits[limit];
    }
    return context;
}

void remove_peer_accesses(Handle context) {
    Contexts& all_contexts = contexts();
    std::lock_guard lock(all_contexts.mutex);
    std::erase_if(all_contexts.peer_accesses,
                  [=](const auto& pair) { return pair.first == context || pair.second == context; });
}

// Destroy all streams, events, textures, arrays and memory of a context that ends, and disable its peer access.
void destroy_contents(const ContextRef& context) {
    close_streams(context);
    destroy_context_streams(context->handle);
    destroy_context_events(context->handle);
    destroy_context_textures(context->handle);
    destroy_context_arrays(context->handle);
    destroy_context_memory(context->handle);
    remove_peer_accesses(context->handle);
}

Result create_context(Handle* handle, std::uint32_t flags, Device device) {
    if (handle == nullptr || !is_valid_context_flags(flags)) {
        return invalid_value;
    }
    if (!device_exists(device)) {
        return invalid_device;
    }
    Contexts& all_contexts = contexts();
    ContextRef context;
    {
        std::lock_guard lock(all_contexts.mutex);
        context = make_context_locked(&all_contexts, device, flags);
        context->is_alive = true;
        all_contexts.live_contexts.emplace(context->handle, context);
    }
    record_open_handle(ledger_kind, context->handle);
    thread_stack().push_back(context);
    *handle = context->handle;
    return success;
}

ContextRef retain_primary(Device device) {
    Contexts& all_contexts = contexts();
    std::unique_lock lock(all_contexts.mutex);
    PrimaryContext& primary = all_contexts.primary_contexts[device];
    all_contexts.context_ended.wait(lock, [&] { return !primary.is_ending; });
    if (!primary.context) {
        primary.context = make_context_locked(&all_contexts, device, primary.flags);
        primary.context->is_primary = true;
    }
    if (primary.reference_count++ == 0) {
        primary.context->flags = primary.flags | context_map_host;
        primary.context->is_alive = true;
        all_contexts.live_contexts.emplace(primary.context->handle, primary.context);
        record_open_handle(primary_ledger_kind, primary.context->handle);
    }
    return primary.context;
}

// Drop one reference to the device's primary context, or all references (cuDevicePrimaryCtxReset). When no reference is
// left, destroy the contents of the context. Meanwhile, calls that retain or release the context wait.
Result release_primary(Device device, bool drops_all_references) {
    if (!device_exists(device)) {
        return invalid_device;
    }
    Contexts& all_contexts = contexts();
    ContextRef released_context;
    {
        std::unique_lock lock(all_contexts.mutex);
        PrimaryContext& primary = all_contexts.primary_contexts[device];
        all_contexts.context_ended.wait(lock, [&] { return !primary.is_ending; });
        if (primary.reference_count == 0) {
            return drops_all_references ? success : invalid_context;
        }
        primary.reference_count = drops_all_references ? 0 : primary.reference_count - 1;
        if (primary.reference_count == 0) {
            primary.is_ending = true;
            released_context = primary.context;
            released_context->is_alive = false;
            all_contexts.live_contexts.erase(released_context->handle);
        }
    }
    if (released_context) {
        destroy_contents(released_context);
        const bool is_removed = record_closed_handle(primary_ledger_kind, released_context->handle);
        std::lock_guard lock(all_contexts.mutex);
        all_contexts.primary_contexts[device].is_ending = false;
        all_contexts.context_ended.notify_all();
        return is_removed ? success : invalid_context;
    }
    return success;
}

Result set_primary_flags(Device device, std::uint32_t flags) {
    if (!device_exists(device)) {
        return invalid_device;
    }
    if (!is_valid_context_flags(flags)) {
        return invalid_value;
    }
    Contexts& all_contexts = contexts();
    std::lock_guard lock(all_contexts.mutex);
    PrimaryContext& primary = all_contexts.primary_contexts[device];
    primary.flags = flags;
    if (primary.reference_count != 0) {
        primary.context->flags = flags | context_map_host;
    }
    return success;
}

} // namespace

Handle make_handle() {
    // The start value is far from the addresses of this process. The handles only grow, so no handle is issued twice.
    static std::atomic<Handle> last_handle{0x7e57'0000'0000};
    return last_handle += 16;
}

Result find_current_context(ContextRef* context) {
    const auto& stack = thread_stack();
    if (stack.empty()) {
        return invalid_context;
    }
    *context = stack.back();
    return (*context)->is_alive ? success : context_is_destroyed;
}

ContextRef make_green_context(Device device, Handle green_context) {
    const ContextRef primary = retain_primary(device);
    Contexts& all_contexts = contexts();
    std::lock_guard lock(all_contexts.mutex);
    const ContextRef context = make_context_locked(&all_contexts, device, primary->flags);
    context->green_context = green_context;
    context->owning_context_handle = primary->handle;
    context->is_alive = true;
    all_contexts.live_contexts.emplace(context->handle, context);
    return context;
}

void destroy_green_context(const ContextRef& context) {
    {
        Contexts& all_contexts = contexts();
        std::lock_guard lock(all_contexts.mutex);
        all_contexts.live_contexts.erase(context->handle);
    }
    context->is_alive = false;
    close_streams(context);
    destroy_context_streams(context->handle);
    remove_peer_accesses(context->handle);
    (void)release_primary(context->device, false);
}

bool is_valid_context_flags(std::uint32_t flags) {
    const std::uint32_t scheduling = flags & context_sched_mask;
    return (flags & ~context_flags_mask) == 0 && (scheduling & (scheduling - 1)) == 0;
}

bool has_live_context(Device device) {
    Contexts& all_contexts = contexts();
    std::lock_guard lock(all_contexts.mutex);
    return std::ranges::any_of(all_contexts.live_contexts,
                               [&](const auto& entry) { return entry.second->device == device; });
}

Result find_context(Handle handle, ContextRef* context) {
    Contexts& all_contexts = contexts();
    std::lock_guard lock(all_contexts.mutex);
    const auto entry = all_contexts.live_contexts.find(handle);
    if (entry == all_contexts.live_contexts.end()) {
        return invalid_context;
    }
    *context = entry->second;
    return success;
}

bool is_sync_memops_set(const Context& context) {
    return (context.flags & context_sync_memops) != 0;
}

// ---- primary contexts

GDRKIT_CUDA_ENTRY Result cuDevicePrimaryCtxRetain(Handle* handle, Device device) {
    return run_entry("cuDevicePrimaryCtxRetain", [&] {
        if (handle == nullptr) {
            return invalid_value;
        }
        if (!device_exists(device)) {
            return invalid_device;
        }
        *handle = retain_primary(device)->handle;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDevicePrimaryCtxRelease(Device device) {
    return run_entry("cuDevicePrimaryCtxRelease", [&] { return release_primary(device, false); });
}

GDRKIT_CUDA_ENTRY Result cuDevicePrimaryCtxRelease_v2(Device device) {
    return run_entry("cuDevicePrimaryCtxRelease_v2", [&] { return release_primary(device, false); });
}

GDRKIT_CUDA_ENTRY Result cuDevicePrimaryCtxReset(Device device) {
    return run_entry("cuDevicePrimaryCtxReset", [&] { return release_primary(device, true); });
}

GDRKIT_CUDA_ENTRY Result cuDevicePrimaryCtxReset_v2(Device device) {
    return run_entry("cuDevicePrimaryCtxReset_v2", [&] { return release_primary(device, true); });
}

GDRKIT_CUDA_ENTRY Result cuDevicePrimaryCtxSetFlags(Device device, unsigned flags) {
    return run_entry("cuDevicePrimaryCtxSetFlags", [&] { return set_primary_flags(device, flags); });
}

GDRKIT_CUDA_ENTRY Result cuDevicePrimaryCtxSetFlags_v2(Device device, unsigned flags) {
    return run_entry("cuDevicePrimaryCtxSetFlags_v2", [&] { return set_primary_flags(device, flags); });
}

GDRKIT_CUDA_ENTRY Result cuDevicePrimaryCtxGetState(Device device, unsigned* flags, int* active) {
    return run_entry("cuDevicePrimaryCtxGetState", [&] {
        if (!device_exists(device)) {
            return invalid_device;
        }
        if (flags == nullptr || active == nullptr) {
            return invalid_value;
        }
        Contexts& all_contexts = contexts();
        std::lock_guard lock(all_contexts.mutex);
        const PrimaryContext& primary = all_contexts.primary_contexts[device];
        *active = primary.reference_count != 0 ? 1 : 0;
        *flags = primary.flags;
        return success;
    });
}

// ---- contexts of cuCtxCreate

GDRKIT_CUDA_ENTRY Result cuCtxCreate_v2(Handle* handle, unsigned flags, Device device) {
    return run_entry("cuCtxCreate_v2", [&] { return create_context(handle, flags, device); });
}

GDRKIT_CUDA_ENTRY Result cuCtxCreate_v3(Handle* handle, void* affinity, int affinity_count, unsigned flags,
                                        Device device) {
    return run_entry("cuCtxCreate_v3", [&] {
        const bool has_no_parameters = affinity == nullptr && affinity_count == 0;
        return has_no_parameters ? create_context(handle, flags, device) : not_supported;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxCreate_v4(Handle* handle, const ContextParameters* parameters, unsigned flags,
                                        Device device) {
    return run_entry("cuCtxCreate_v4", [&] {
        const bool has_no_parameters =
            parameters == nullptr || (parameters->exec_affinity == nullptr && parameters->cig == nullptr);
        return has_no_parameters ? create_context(handle, flags, device) : not_supported;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxDestroy_v2(Handle handle) {
    return run_entry("cuCtxDestroy_v2", [&] {
        ContextRef context;
        {
            Contexts& all_contexts = contexts();
            std::lock_guard lock(all_contexts.mutex);
            const auto entry = all_contexts.live_contexts.find(handle);
            if (entry != all_contexts.live_contexts.end()) {
                context = entry->second;
            }
        }
        if (context && (context->is_primary || context->green_context != 0)) {
            return invalid_context;
        }
        // If two threads destroy the same context, only one of them removes the ledger entry. The other fails here.
        if (!record_closed_handle(ledger_kind, handle)) {
            return invalid_context;
        }
        {
            Contexts& all_contexts = contexts();
            std::lock_guard lock(all_contexts.mutex);
            all_contexts.live_contexts.erase(handle);
        }
        context->is_alive = false;
        destroy_contents(context);
        auto& stack = thread_stack();
        if (!stack.empty() && stack.back() == context) {
            stack.pop_back();
        }
        return success;
    });
}

// ---- the stack of the calling thread

GDRKIT_CUDA_ENTRY Result cuCtxPushCurrent_v2(Handle handle) {
    return run_entry("cuCtxPushCurrent_v2", [&] {
        ContextRef context;
        const Result result = find_context(handle, &context);
        if (result == success) {
            thread_stack().push_back(std::move(context));
        }
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxPopCurrent_v2(Handle* handle) {
    return run_entry("cuCtxPopCurrent_v2", [&] {
        auto& stack = thread_stack();
        if (stack.empty()) {
            return invalid_context;
        }
        if (handle != nullptr) {
            *handle = stack.back()->handle;
        }
        stack.pop_back();
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxSetCurrent(Handle handle) {
    return run_entry("cuCtxSetCurrent", [&] {
        ContextRef context;
        if (handle != 0) {
            if (const Result result = find_context(handle, &context); result != success) {
                return result;
            }
        }
        auto& stack = thread_stack();
        if (!stack.empty()) {
            stack.pop_back();
        }
        if (context) {
            stack.push_back(std::move(context));
        }
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxGetCurrent(Handle* handle) {
    return run_entry("cuCtxGetCurrent", [&] {
        if (handle == nullptr) {
            return invalid_value;
        }
        const auto& stack = thread_stack();
        *handle = stack.empty() ? 0 : stack.back()->handle;
        return success;
    });
}

// ---- peers

GDRKIT_CUDA_ENTRY Result cuCtxEnablePeerAccess(Handle peer, unsigned flags) {
    return run_entry_in_context("cuCtxEnablePeerAccess", [&](const ContextRef& context) {
        ContextRef peer_context;
        if (const Result result = find_context(peer, &peer_context); result != success) {
            return result;
        }
        if (flags != 0) {
            return invalid_value;
        }
        if (peer_context->device == context->device) {
            return peer_access_unsupported;
        }
        Contexts& all_contexts = contexts();
        std::lock_guard lock(all_contexts.mutex);
        return all_contexts.peer_accesses.emplace(context->handle, peer).second ? success : peer_access_already_enabled;
    });
}

GDRKIT_CUDA_ENTRY Result cuCtxDisablePeerAccess(Handle peer) {
    return run_entry_in_context("cuCtxDisablePeerAccess", [&](const ContextRef& context) {
        ContextRef peer_context;
        if (const Result result = find_context(peer, &peer_context); result != success) {
            return result;
        }
        Contexts& all_contexts = contexts();
        std::lock_guard lock(all_contexts.mutex);
        return all_contexts.peer_accesses.erase({context->handle, peer}) == 1 ? success : peer_access_not_enabled;
    });
}

} // namespace gdrkit::twin::cuda
