// Contexts: the primary one of each device, those that cuCtxCreate makes, and the stack of each thread.
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

struct Stream;

struct Context {
    Handle handle = 0;
    std::uint64_t id = 0;
    Device device = 0;
    bool primary = false;
    std::atomic<std::uint32_t> flags{0};
    // A primary context that nobody retains is not alive, and lives again (with the same handle) at the next retain.
    std::atomic<bool> alive{false};
    std::array<std::atomic<std::uint64_t>, limit_count> limits{};

    // Guarded by the mutex of stream.cpp.
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams; // all but the legacy one, until their last work is done
    std::map<std::thread::id, std::shared_ptr<Stream>> thread_streams;
};
using ContextRef = std::shared_ptr<Context>;

// The context on top of the calling thread's stack. invalid_context: none; context_is_destroyed: it died.
Result current_context(ContextRef* context);

// The live context of this handle; invalid_context when there is none.
Result find_context(Handle handle, ContextRef* context);

// Whether synchronous calls in this context wait for what CUDA may leave unfinished (CU_CTX_SYNC_MEMOPS).
bool synchronises_memops(const Context& context);

// A handle that no other object of this process has or had.
Handle new_handle();

} // namespace gdrkit::twin::cuda
