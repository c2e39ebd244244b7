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

// One mutex and one condition variable serve all streams: simple, and fast enough for software.
struct StreamEngine {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t last_id = 0;
};

StreamEngine& engine() {
    // Never destroyed, because threads of streams may still run while the process exits.
    static auto* const the_engine = new StreamEngine;
    return *the_engine;
}

bool done_locked(const std::vector<MarkerRef>& markers) {
    return std::ranges::all_of(markers, [](const MarkerRef& marker) { return marker->done; });
}

void add_unfinished(const StreamRef& stream, std::vector<MarkerRef>* markers) {
    if (stream && stream->last_marker && !stream->last_marker->done) {
        markers->push_back(stream->last_marker);
    }
}

void remove_from_context_locked(const StreamRef& stream) {
    if (const ContextRef context = stream->context.lock()) {
        std::erase(context->streams, stream);
    }
}

// Body of a stream's thread. It holds a reference to the stream, which therefore outlives its last work.
void run_stream_thread(StreamRef stream) {
    StreamEngine& all = engine();
    std::unique_lock lock(all.mutex);
    while (true) {
        all.changed.wait(lock, [&] { return !stream->queue.empty() || stream->closed; });
        if (stream->queue.empty()) {
            break;
        }
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        all.changed.wait(lock, [&] { return done_locked(work.dependencies); });
        lock.unlock();
        if (work.delayed) {
            sleep_random_delay();
        }
        if (work.run) {
            work.run();
        }
        // Release what the work references (memory that was freed meanwhile) before its completion is visible.
        work.run = nullptr;
        lock.lock();
        work.marker->done = true;
        work.marker->completed_at = std::chrono::steady_clock::now();
        all.changed.notify_all();
    }
    stream->has_thread = false;
    remove_from_context_locked(stream);
}

StreamRef new_stream_locked(StreamEngine* all, const ContextRef& context, std::uint32_t flags, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->handle = new_handle();
    stream->id = ++all->last_id;
    stream->context = context;
    stream->device = context->device;
    stream->flags = flags;
    stream->priority = priority;
    return stream;
}

} // namespace

StreamRef make_stream(const ContextRef& context, std::uint32_t flags, int priority) {
    StreamEngine& all = engine();
    std::lock_guard lock(all.mutex);
    StreamRef stream = new_stream_locked(&all, context, flags, priority);
    context->streams.push_back(stream);
    return stream;
}

void close_stream(const StreamRef& stream) {
    StreamEngine& all = engine();
    std::lock_guard lock(all.mutex);
    stream->closed = true;
    if (!stream->has_thread) {
        remove_from_context_locked(stream);
    }
    all.changed.notify_all();
}

StreamRef legacy_stream(const ContextRef& context) {
    StreamEngine& all = engine();
    std::lock_guard lock(all.mutex);
    if (!context->legacy) {
        context->legacy = new_stream_locked(&all, context, 0, 0);
    }
    return context->legacy;
}

StreamRef thread_stream(const ContextRef& context) {
    StreamEngine& all = engine();
    std::lock_guard lock(all.mutex);
    StreamRef& stream = context->thread_streams[std::this_thread::get_id()];
    if (!stream) {
        stream = new_stream_locked(&all, context, 0, 0);
        context->streams.push_back(stream);
    }
    return stream;
}

MarkerRef enqueue(const StreamRef& stream, std::function<void()> run, Timing timing, std::vector<MarkerRef> after) {
    StreamEngine& all = engine();
    std::lock_guard lock(all.mutex);
    Work work{std::move(run), std::move(after), std::make_shared<Marker>(), timing == Timing::delayed};
    if (const ContextRef context = stream->context.lock()) {
        if (stream == context->legacy) {
            for (const StreamRef& other : context->streams) {
                if (other->blocking()) {
                    add_unfinished(other, &work.dependencies);
                }
            }
        } else if (stream->blocking()) {
            add_unfinished(context->legacy, &work.dependencies);
        }
    }
    if (!stream->has_thread) {
        start_signal_blocking_thread([stream] { run_stream_thread(stream); }).detach();
        stream->has_thread = true;
    }
    MarkerRef marker = work.marker;
    stream->last_marker = marker;
    stream->queue.push_back(std::move(work));
    all.changed.notify_all();
    return marker;
}

void wait_until_done(const MarkerRef& marker) {
    StreamEngine& all = engine();
    std::unique_lock lock(all.mutex);
    all.changed.wait(lock, [&] { return marker->done; });
}

std::vector<MarkerRef> unfinished_work(const StreamRef& stream) {
    StreamEngine& all = engine();
    std::lock_guard lock(all.mutex);
    std::vector<MarkerRef> markers;
    add_unfinished(stream, &markers);
    const ContextRef context = stream->context.lock();
    if (context && stream == context->legacy) {
        for (const StreamRef& other : context->streams) {
            if (other->blocking()) {
                add_unfinished(other, &markers);
            }
        }
    }
    return markers;
}

bool all_complete(const std::vector<MarkerRef>& markers) {
    std::lock_guard lock(engine().mutex);
    return done_locked(markers);
}

void wait_until_done(const std::vector<MarkerRef>& markers) {
    StreamEngine& all = engine();
    std::unique_lock lock(all.mutex);
    all.changed.wait(lock, [&] { return done_locked(markers); });
}

std::chrono::steady_clock::time_point completion_time_of(const MarkerRef& marker) {
    std::lock_guard lock(engine().mutex);
    return marker->completed_at;
}

void synchronise(const ContextRef& context) {
    std::vector<MarkerRef> markers;
    {
        std::lock_guard lock(engine().mutex);
        add_unfinished(context->legacy, &markers);
        for (const StreamRef& stream : context->streams) {
            add_unfinished(stream, &markers);
        }
    }
    wait_until_done(markers);
}

void close_streams(const ContextRef& context) {
    synchronise(context);
    StreamEngine& all = engine();
    std::lock_guard lock(all.mutex);
    if (context->legacy) {
        context->legacy->closed = true;
        context->legacy.reset();
    }
    context->thread_streams.clear();
    for (const StreamRef& stream : std::exchange(context->streams, {})) {
        stream->closed = true;
    }
    all.changed.notify_all();
}

} // namespace gdrkit::twin::cuda
