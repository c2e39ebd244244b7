// CUDA contexts: the primary context of each device, contexts of cuCtxCreate, and the context stack of each thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

struct Marker;
struct Stream;

struct Context {
    Handle handle = 0;
    std::uint64_t id = 0; // result of cuCtxGetId
    Device device = 0;
    bool is_primary = false;
    Handle green_context = 0; // handle of the green context that this context represents, or 0
    // The context to which memory, arrays and events of this context belong: for a green context the primary context,
    // for other contexts this context.
    Handle owning_context_handle = 0;
    std::atomic<std::uint32_t> flags{0};
    // A primary context without references is not alive. The next retain makes it alive again with the same handle.
    std::atomic<bool> is_alive{false};
    std::array<std::atomic<std::uint64_t>, limit_count> limits{}; // indexed by CUlimit

    // The following members are guarded by the mutex of stream.cpp. `streams` has every stream except the legacy
    // default stream. A destroyed stream stays in `streams` until its queued work is done.
    std::shared_ptr<Stream> legacy_stream;
    std::vector<std::shared_ptr<Stream>> streams;
    std::map<std::thread::id, std::shared_ptr<Stream>> thread_streams; // the per-thread default streams
    // The marker of the last copy between this context and another context, or null. All later work of this context
    // waits for this marker.
    std::shared_ptr<Marker> barrier;
};
using ContextRef = std::shared_ptr<Context>;

// Find the context on top of the calling thread's stack. Fail with invalid_context if the stack is empty, and with
// context_is_destroyed if the context was destroyed.
Result find_current_context(ContextRef* context);

// Find the live context with this handle, or fail with invalid_context.
Result find_context(Handle handle, ContextRef* context);

// Create the context that represents a green context. The new context is current in no thread, and retains
// the primary context of the device.
ContextRef make_green_context(Device device, Handle green_context);
// Destroy this context and its streams, and release the primary context.
void destroy_green_context(const ContextRef& context);

// Return whether the flags are valid CUctx_flags with at most one scheduling flag.
bool is_valid_context_flags(std::uint32_t flags);

// Return whether a context of this device is alive.
bool has_live_context(Device device);

// Return whether synchronous calls in this context wait for transfers that CUDA may otherwise leave unfinished
// (CU_CTX_SYNC_MEMOPS).
bool is_sync_memops_set(const Context& context);

// Return a handle that is unique in this process and never reused.
Handle make_handle();

} // namespace gdrkit::twin::cuda
