// Streams of the CUDA twin. Each stream has a thread that carries out the queued work in order, after random delays.
// Each queued work has a marker, which says whether the work is done.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"
#include "cuda/graph_abi.hpp"

namespace gdrkit::twin::cuda {

// A marker tells whether queued work is done, and when it was done. The mutex of stream.cpp guards both members.
struct Marker {
    bool is_done = false;
    std::chrono::steady_clock::time_point completion_time{};
};
using MarkerRef = std::shared_ptr<Marker>;

struct Work {
    std::function<void()> run;           // empty: the work is only a point for which other work can wait
    std::vector<MarkerRef> dependencies; // markers of the work that must be done first
    MarkerRef marker;
    bool is_delayed = true; // the thread of the stream sleeps for a random time before it calls `run`
};

struct Capture;
struct Node;

struct Stream {
    Handle handle = 0;
    std::uint64_t id = 0; // the result of cuStreamGetId
    std::weak_ptr<Context> context;
    Device device = 0;
    std::uint32_t flags = 0; // CUstream_flags
    int priority = 0;

    // The mutex of stream.cpp guards these four members.
    std::deque<Work> queue;
    MarkerRef last_marker; // marker of the last queued work, or null
    bool has_thread = false;
    bool is_closed = false; // the thread ends when the queue is empty

    // graph_mutex() guards these four members.
    std::shared_ptr<Capture> capture;                        // the capture to which the stream belongs, or null
    std::vector<std::shared_ptr<Node>> capture_dependencies; // the nodes on which the next captured node depends
    // Copies for the program, to which cuStreamGetCaptureInfo has returned pointers: the handles of
    // capture_dependencies, and the data of their edges.
    std::vector<Handle> capture_handles;
    std::vector<EdgeData> capture_edges;

    [[nodiscard]] bool is_blocking() const { return (flags & stream_non_blocking) == 0; }
};
using StreamRef = std::shared_ptr<Stream>;

// Priorities of an H200: a smaller number is more urgent. The twin stores the priority of a stream but ignores it.
inline constexpr int least_stream_priority = 0;
inline constexpr int greatest_stream_priority = -5;

// The treatment of a stream that is being captured. refuse: the call fails. allow: the capture records the work of the
// call. manage: the call queries or changes the capture itself.
enum class CapturePolicy { refuse, allow, manage };

// Find the stream of a handle: a created stream, the legacy default stream of the context, or the calling thread's
// default stream. With CapturePolicy::refuse, fail for a captured stream, and invalidate its capture.
Result find_stream(Handle handle, const ContextRef& context, StreamRef* stream,
                   CapturePolicy capture_policy = CapturePolicy::refuse);

// Return the legacy default stream of the context, or the calling thread's default stream. Both are made at their first
// use.
StreamRef get_legacy_stream(const ContextRef& context);
StreamRef get_thread_stream(const ContextRef& context);

// Make a stream of the program, which the ledger counts, and store its handle.
Result create_stream(const ContextRef& context, Handle* handle, unsigned flags, int priority);
// Make a stream that the ledger does not count.
StreamRef make_stream(const ContextRef& context, std::uint32_t flags, int priority);
// Close a stream whose handle was destroyed. Its queued work is still carried out.
void close_stream(const StreamRef& stream);

// delayed: the thread of the stream sleeps for a random time before it carries out the work.
enum class Timing { delayed, immediate };

// Queue work and return its marker. Work in the legacy stream waits for all earlier work in the blocking streams of its
// context. Work in a blocking stream waits for all earlier work in the legacy stream. `dependencies` are further
// markers to wait for.
MarkerRef enqueue(const StreamRef& stream, std::function<void()> run, Timing timing,
                  std::vector<MarkerRef> dependencies = {});

// Queue work in a stream. The work runs after all earlier work, and before all later work, in every stream of the
// contexts.
MarkerRef enqueue_barrier(const StreamRef& stream, std::function<void()> run, Timing timing,
                          const std::vector<ContextRef>& contexts);

// Make a marker that is not done. complete_marker() sets it to done.
MarkerRef make_marker();
void complete_marker(const MarkerRef& marker);

void wait_until_done(const MarkerRef& marker);
void wait_until_done(const std::vector<MarkerRef>& markers);
std::chrono::steady_clock::time_point get_completion_time(const MarkerRef& marker);

// Return the markers that must be done for the stream to be idle.
std::vector<MarkerRef> list_unfinished_markers(const StreamRef& stream);
bool are_done(const std::vector<MarkerRef>& markers);

// Wait for all work that is queued in the context.
void synchronise(const ContextRef& context);

// Wait for all work of the context and close its streams.
void close_streams(const ContextRef& context);

// Destroy the stream handles of a context that ends.
void destroy_context_streams(Handle context);

// Return whether the calling thread runs a host function of a stream. A host function must not call the driver.
bool is_in_host_function();

// Return the work that calls a host function. During this call the thread must not call the driver.
std::function<void()> make_host_function_work(void (*function)(void*), void* user_data);

} // namespace gdrkit::twin::cuda
