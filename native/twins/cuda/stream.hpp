// Streams. Each has a thread that carries out its work in order, after random delays. A marker belongs to one
// operation in a stream and records whether that operation has completed.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

struct Marker {
    bool done = false; // guarded by the mutex of stream.cpp
    std::chrono::steady_clock::time_point completed_at{};
};
using MarkerRef = std::shared_ptr<Marker>;

struct Work {
    std::function<void()> run;           // empty: only a point in the stream
    std::vector<MarkerRef> dependencies; // Markers of the operations that must complete first.
    MarkerRef marker;
    bool delayed = true;
};

struct Stream {
    Handle handle = 0;
    std::uint64_t id = 0;
    std::weak_ptr<Context> context;
    Device device = 0;
    std::uint32_t flags = 0;
    int priority = 0;

    // Guarded by the mutex of stream.cpp.
    std::deque<Work> queue;
    MarkerRef last_marker; // Marker of the last queued operation, or null.
    bool has_thread = false;
    bool closed = false;

    [[nodiscard]] bool blocking() const { return (flags & stream_non_blocking) == 0; }
};
using StreamRef = std::shared_ptr<Stream>;

// Priorities as of an H200; a smaller number is more urgent. The twin treats all alike.
inline constexpr int min_stream_priority = 0;
inline constexpr int stream_priority_greatest = -5;

// Find the stream of a handle: a created stream, the legacy default stream of the context, or the calling thread's
// default stream.
Result find_stream(Handle handle, const ContextRef& context, StreamRef* stream);

StreamRef legacy_stream(const ContextRef& context);
StreamRef thread_stream(const ContextRef& context);

// Create a stream in the context, and close it: queued work is still carried out.
StreamRef make_stream(const ContextRef& context, std::uint32_t flags, int priority);
void close_stream(const StreamRef& stream);

enum class Timing { delayed, immediate };

// Queue work and return its marker. Work in the legacy stream waits for all earlier work of the blocking streams of its
// context, and their work waits for earlier work of the legacy stream. `after` lists other markers to wait for.
MarkerRef enqueue(const StreamRef& stream, std::function<void()> run, Timing timing, std::vector<MarkerRef> after = {});

void wait_until_done(const MarkerRef& marker);
void wait_until_done(const std::vector<MarkerRef>& markers);
std::chrono::steady_clock::time_point completion_time_of(const MarkerRef& marker);

// Return the markers that must be done for the stream to be idle.
std::vector<MarkerRef> unfinished_work(const StreamRef& stream);
bool all_complete(const std::vector<MarkerRef>& markers);

// Wait for all work that is queued in the context.
void synchronise(const ContextRef& context);

// Wait for all work of the context and close its streams.
void close_streams(const ContextRef& context);

// Destroy the stream handles of a context that ends.
void destroy_streams_of(Handle context);

// Return whether the calling thread runs a host function of a stream, which must not call the driver.
bool is_in_host_function();

} // namespace gdrkit::twin::cuda
