// Implements streams: one thread per stream carries out its queued work in order, after random delays.

#include "cuda/stream.hpp"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "model/config.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::cuda {
namespace {

// All streams share one mutex and one condition variable, which is simple and fast enough for a twin.
struct StreamEngine {
    std::mutex mutex;
    std::condition_variable state_changed; // notified when work is queued or done, and when a stream is closed
    std::uint64_t last_stream_id = 0;
};

StreamEngine& engine() {
    // The engine is never destroyed, because threads of streams may still run while the process exits.
    static auto* const instance = new StreamEngine;
    return *instance;
}

bool are_all_done_locked(const std::vector<MarkerRef>& markers) {
    return std::ranges::all_of(markers, [](const MarkerRef& marker) { return marker->is_done; });
}

// Add the marker of the stream's last work, unless that work is done.
void add_unfinished_locked(const StreamRef& stream, std::vector<MarkerRef>* markers) {
    if (stream && stream->last_marker && !stream->last_marker->is_done) {
        markers->push_back(stream->last_marker);
    }
}

void remove_from_context_locked(const StreamRef& stream) {
    if (const ContextRef context = stream->context.lock()) {
        std::erase(context->streams, stream);
    }
}

// Carry out the work of a stream in its thread. The thread holds a reference to the stream, so the stream outlives its
// last work.
void run_stream_thread(StreamRef stream) {
    StreamEngine& stream_engine = engine();
    std::unique_lock lock(stream_engine.mutex);
    while (true) {
        stream_engine.state_changed.wait(lock, [&] { return !stream->queue.empty() || stream->is_closed; });
        if (stream->queue.empty()) {
            break;
        }
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream_engine.state_changed.wait(lock, [&] { return are_all_done_locked(work.dependencies); });
        lock.unlock();
        if (work.is_delayed) {
            sleep_random_delay();
        }
        if (work.run) {
            work.run();
        }
        // Before the work counts as done, release the objects that it references, such as memory that the
        // program has freed.
        work.run = nullptr;
        lock.lock();
        work.marker->is_done = true;
        work.marker->completion_time = std::chrono::steady_clock::now();
        stream_engine.state_changed.notify_all();
    }
    stream->has_thread = false;
    remove_from_context_locked(stream);
}

StreamRef make_stream_locked(StreamEngine* stream_engine, const ContextRef& context, std::uint32_t flags,
                             int priority) {
    auto stream = std::make_shared<Stream>();
    stream->handle = make_handle();
    stream->id = ++stream_engine->last_stream_id;
    stream->context = context;
    stream->device = context->device;
    stream->flags = flags;
    stream->priority = priority;
    return stream;
}

} // namespace

StreamRef make_stream(const ContextRef& context, std::uint32_t flags, int priority) {
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    StreamRef stream = make_stream_locked(&stream_engine, context, flags, priority);
    context->streams.push_back(stream);
    return stream;
}

void close_stream(const StreamRef& stream) {
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    stream->is_closed = true;
    if (!stream->has_thread) {
        remove_from_context_locked(stream);
    }
    stream_engine.state_changed.notify_all();
}

StreamRef get_legacy_stream(const ContextRef& context) {
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    if (!context->legacy_stream) {
        context->legacy_stream = make_stream_locked(&stream_engine, context, 0, 0);
    }
    return context->legacy_stream;
}

StreamRef get_thread_stream(const ContextRef& context) {
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    StreamRef& stream = context->thread_streams[std::this_thread::get_id()];
    if (!stream) {
        stream = make_stream_locked(&stream_engine, context, 0, 0);
        context->streams.push_back(stream);
    }
    return stream;
}

namespace {

// Add the marker of the context's last copy between contexts, unless that copy is done.
void add_barrier_locked(const ContextRef& context, std::vector<MarkerRef>* markers) {
    if (context->barrier && context->barrier->is_done) {
        context->barrier.reset();
    }
    if (context->barrier) {
        markers->push_back(context->barrier);
    }
}

// Add the markers of the work for which a stream waits without a request of the program: the legacy stream and the
// blocking streams of a context wait for each other, and all streams wait for a copy between contexts.
void add_implicit_dependencies_locked(const StreamRef& stream, std::vector<MarkerRef>* dependencies) {
    const ContextRef context = stream->context.lock();
    if (!context) {
        return;
    }
    if (stream == context->legacy_stream) {
        for (const StreamRef& other_stream : context->streams) {
            if (other_stream->is_blocking()) {
                add_unfinished_locked(other_stream, dependencies);
            }
        }
    } else if (stream->is_blocking()) {
        add_unfinished_locked(context->legacy_stream, dependencies);
    }
    add_barrier_locked(context, dependencies);
}

MarkerRef enqueue_locked(StreamEngine* stream_engine, const StreamRef& stream, std::function<void()> run, Timing timing,
                         std::vector<MarkerRef> dependencies) {
    Work work{std::move(run), std::move(dependencies), std::make_shared<Marker>(), timing == Timing::delayed};
    add_implicit_dependencies_locked(stream, &work.dependencies);
    if (!stream->has_thread) {
        start_signal_blocking_thread([stream] { run_stream_thread(stream); }).detach();
        stream->has_thread = true;
    }
    MarkerRef marker = work.marker;
    stream->last_marker = marker;
    stream->queue.push_back(std::move(work));
    stream_engine->state_changed.notify_all();
    return marker;
}

void add_unfinished_of_context_locked(const ContextRef& context, std::vector<MarkerRef>* markers) {
    add_barrier_locked(context, markers);
    add_unfinished_locked(context->legacy_stream, markers);
    for (const StreamRef& stream : context->streams) {
        add_unfinished_locked(stream, markers);
    }
}

} // namespace

MarkerRef enqueue(const StreamRef& stream, std::function<void()> run, Timing timing,
                  std::vector<MarkerRef> dependencies) {
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    return enqueue_locked(&stream_engine, stream, std::move(run), timing, std::move(dependencies));
}

MarkerRef enqueue_barrier(const StreamRef& stream, std::function<void()> run, Timing timing,
                          const std::vector<ContextRef>& contexts) {
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    std::vector<MarkerRef> dependencies;
    for (const ContextRef& context : contexts) {
        add_unfinished_of_context_locked(context, &dependencies);
    }
    MarkerRef marker = enqueue_locked(&stream_engine, stream, std::move(run), timing, std::move(dependencies));
    for (const ContextRef& context : contexts) {
        context->barrier = marker;
    }
    return marker;
}

MarkerRef make_marker() {
    return std::make_shared<Marker>();
}

void complete_marker(const MarkerRef& marker) {
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    marker->is_done = true;
    marker->completion_time = std::chrono::steady_clock::now();
    stream_engine.state_changed.notify_all();
}

void wait_until_done(const MarkerRef& marker) {
    StreamEngine& stream_engine = engine();
    std::unique_lock lock(stream_engine.mutex);
    stream_engine.state_changed.wait(lock, [&] { return marker->is_done; });
}

std::vector<MarkerRef> list_unfinished_markers(const StreamRef& stream) {
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    std::vector<MarkerRef> markers;
    add_unfinished_locked(stream, &markers);
    const ContextRef context = stream->context.lock();
    if (context && stream == context->legacy_stream) {
        add_barrier_locked(context, &markers);
        for (const StreamRef& other_stream : context->streams) {
            if (other_stream->is_blocking()) {
                add_unfinished_locked(other_stream, &markers);
            }
        }
    }
    return markers;
}

bool are_done(const std::vector<MarkerRef>& markers) {
    std::lock_guard lock(engine().mutex);
    return are_all_done_locked(markers);
}

void wait_until_done(const std::vector<MarkerRef>& markers) {
    StreamEngine& stream_engine = engine();
    std::unique_lock lock(stream_engine.mutex);
    stream_engine.state_changed.wait(lock, [&] { return are_all_done_locked(markers); });
}

std::chrono::steady_clock::time_point get_completion_time(const MarkerRef& marker) {
    std::lock_guard lock(engine().mutex);
    return marker->completion_time;
}

void synchronise(const ContextRef& context) {
    std::vector<MarkerRef> markers;
    {
        std::lock_guard lock(engine().mutex);
        add_unfinished_of_context_locked(context, &markers);
    }
    wait_until_done(markers);
}

void close_streams(const ContextRef& context) {
    synchronise(context);
    StreamEngine& stream_engine = engine();
    std::lock_guard lock(stream_engine.mutex);
    if (context->legacy_stream) {
        context->legacy_stream->is_closed = true;
        context->legacy_stream.reset();
    }
    context->thread_streams.clear();
    for (const StreamRef& stream : std::exchange(context->streams, {})) {
        stream->is_closed = true;
    }
    stream_engine.state_changed.notify_all();
}

} // namespace gdrkit::twin::cuda
