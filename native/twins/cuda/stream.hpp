// Streams: a thread each, work in order, late by seed. A marker stands for one piece of work and says when it is done.
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
    std::chrono::steady_clock::time_point when{};
};
using MarkerRef = std::shared_ptr<Marker>;

struct Work {
    std::function<void()> run; // may be empty: a point in the stream
    std::vector<MarkerRef> after;
    MarkerRef marker;
    bool late = true;
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
    MarkerRef last; // of the work queued last; null: none yet
    bool has_thread = false;
    bool closed = false;

    [[nodiscard]] bool blocking() const { return (flags & stream_non_blocking) == 0; }
};
using StreamRef = std::shared_ptr<Stream>;

// What an H200 answers; a smaller number is served first there. Here all are served alike.
inline constexpr int stream_priority_least = 0;
inline constexpr int stream_priority_greatest = -5;

// The stream of this handle as seen from this context: a created one, the legacy default stream or the calling
// thread's own default stream.
Result find_stream(Handle handle, const ContextRef& context, StreamRef* stream);

StreamRef legacy_stream(const ContextRef& context);
StreamRef thread_stream(const ContextRef& context);

// A new stream of the context, and its end: what is queued is still carried out.
StreamRef make_stream(const ContextRef& context, std::uint32_t flags, int priority);
void close_stream(const StreamRef& stream);

enum class Lateness { late, at_once };

// Queues work and returns its marker. Work of the legacy stream comes after everything queued before in the blocking
// streams of its context, and their work after what was queued in the legacy stream. `after`: what it also waits for.
MarkerRef enqueue(const StreamRef& stream, std::function<void()> run, Lateness lateness,
                  std::vector<MarkerRef> after = {});

void wait_for(const MarkerRef& marker);
void wait_for(const std::vector<MarkerRef>& markers);
std::chrono::steady_clock::time_point time_of(const MarkerRef& marker);

// What must be done for the stream to count as finished now.
std::vector<MarkerRef> pending(const StreamRef& stream);
bool all_done(const std::vector<MarkerRef>& markers);

// Waits for everything that was queued in the context.
void synchronise(const ContextRef& context);

// Waits for all work of the context and takes its streams away.
void close_streams(const ContextRef& context);

// The context ends, and the handles of its streams with it.
void release_streams_of(Handle context);

// Whether the calling thread is running a host function of a stream, where no entry may be called.
bool in_host_function();

} // namespace gdrkit::twin::cuda
