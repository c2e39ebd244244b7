// Streams and events: work is late, ordered where CUDA orders it, and not ordered where it does not.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

// Holds a stream up, from outside: nothing that is queued behind it can run before open().
class Gate {
public:
    explicit Gate(Handle stream) { WORKS("cuLaunchHostFunc", stream, &Gate::wait, static_cast<void*>(this)); }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;
    void open() {
        std::lock_guard lock(mutex_);
        open_ = true;
        opened_.notify_all();
    }

private:
    static void wait(void* self) {
        auto* const gate = static_cast<Gate*>(self);
        std::unique_lock lock(gate->mutex_);
        gate->opened_.wait(lock, [=] { return gate->open_; });
    }
    std::mutex mutex_;
    std::condition_variable opened_;
    bool open_ = false;
};

Handle stream_of(unsigned flags) {
    Handle stream = 0;
    WORKS("cuStreamCreate", &stream, flags);
    return stream;
}

Handle event_of(unsigned flags = 0) {
    Handle event = 0;
    WORKS("cuEventCreate", &event, flags);
    return event;
}

unsigned char* pinned(u64 length_bytes) {
    void* host = nullptr;
    WORKS("cuMemHostAlloc", &host, length_bytes, 0U);
    return static_cast<unsigned char*>(host);
}

// A copy that nobody waited for has not happened, and has after the wait.
void an_asynchronous_copy_is_late() {
    const Handle stream = stream_of(stream_non_blocking);
    const u64 memory = allocate(1000);
    unsigned char* const host = pinned(1000);
    write_device(memory, std::vector<unsigned char>(1000, 8));
    Gate gate(stream);
    WORKS("cuMemcpyDtoHAsync_v2", static_cast<void*>(host), memory, u64{1000}, stream);
    CHECK(host[0] == 0 && host[999] == 0);
    ANSWERS(not_ready, "cuStreamQuery", stream);
    gate.open();
    WORKS("cuStreamSynchronize", stream);
    WORKS("cuStreamQuery", stream);
    CHECK(host[0] == 8 && host[999] == 8);
    WORKS("cuStreamDestroy_v2", stream);
    WORKS("cuMemFreeHost", static_cast<void*>(host));
    WORKS("cuMemFree_v2", memory);
}

// Without a gate too, at least now and then (the delay of one operation may be near zero).
void lateness_is_seen() {
    const Handle stream = stream_of(stream_non_blocking);
    const u64 memory = allocate(8);
    unsigned char* const host = pinned(8);
    int late = 0;
    for (int round = 0; round < 20; ++round) {
        WORKS("cuMemcpyDtoHAsync_v2", static_cast<void*>(host), memory, u64{8}, stream);
        late += cu("cuStreamQuery", stream) == not_ready ? 1 : 0;
        WORKS("cuStreamSynchronize", stream);
    }
    CHECK(late > 0);
    WORKS("cuStreamDestroy_v2", stream);
    WORKS("cuMemFreeHost", static_cast<void*>(host));
    WORKS("cuMemFree_v2", memory);
}

// Pageable memory is read before the call returns, and written before it returns.
void pageable_memory_is_staged() {
    const Handle stream = stream_of(stream_non_blocking);
    const u64 memory = allocate(100);
    std::vector<unsigned char> source(100, 6), target(100, 0);
    {
        Gate gate(stream);
        WORKS("cuMemcpyHtoDAsync_v2", memory, static_cast<const void*>(source.data()), u64{100}, stream);
        source.assign(100, 1);
        gate.open();
        WORKS("cuMemcpyDtoHAsync_v2", static_cast<void*>(target.data()), memory, u64{100}, stream);
        CHECK(target[0] == 6 && target[99] == 6);
    }
    WORKS("cuStreamDestroy_v2", stream);
    WORKS("cuMemFree_v2", memory);
}

void the_default_stream_waits_for_blocking_streams() {
    const Handle blocking = stream_of(0), free_running = stream_of(stream_non_blocking);
    const u64 memory = allocate(4);
    Gate gate(blocking);
    WORKS("cuMemsetD8Async", memory, static_cast<unsigned char>(1), u64{4}, blocking);
    WORKS("cuMemsetD8_v2", memory, static_cast<unsigned char>(2), u64{4});
    ANSWERS(not_ready, "cuStreamQuery", Handle{0});
    // What does not block runs meanwhile, and what blocks comes after the default stream.
    WORKS("cuMemsetD8Async", memory, static_cast<unsigned char>(3), u64{4}, free_running);
    WORKS("cuStreamSynchronize", free_running);
    const Handle other = stream_of(0);
    WORKS("cuMemsetD8Async", memory + 1, static_cast<unsigned char>(4), u64{1}, other);
    ANSWERS(not_ready, "cuStreamQuery", other);
    gate.open();
    WORKS("cuCtxSynchronize");
    CHECK((read_device(memory, 4) == std::vector<unsigned char>{2, 4, 2, 2}));
    for (const Handle stream : {blocking, free_running, other}) {
        WORKS("cuStreamDestroy_v2", stream);
    }
    WORKS("cuMemFree_v2", memory);
}

// A fill returns before it is done, unless the memory asks for the contrary.
void fills_are_late_unless_asked() {
    const Handle blocking = stream_of(0);
    const u64 memory = allocate(4);
    Gate gate(blocking);
    WORKS("cuMemsetD8_v2", memory, static_cast<unsigned char>(7), u64{4});
    WORKS("cuMemcpyDtoD_v2", memory, memory + 2, u64{2});
    ANSWERS(not_ready, "cuStreamQuery", Handle{0});
    gate.open();
    WORKS("cuStreamSynchronize", Handle{0});
    const unsigned on = 1;
    WORKS("cuPointerSetAttribute", static_cast<const void*>(&on), static_cast<int>(pointer_sync_memops), memory);
    for (int round = 0; round < 10; ++round) {
        WORKS("cuMemsetD8_v2", memory, static_cast<unsigned char>(round), u64{4});
        WORKS("cuStreamQuery", Handle{0});
    }
    WORKS("cuCtxSetFlags", static_cast<unsigned>(context_sync_memops));
    const u64 other = allocate(4);
    for (int round = 0; round < 10; ++round) {
        WORKS("cuMemsetD8_v2", other, static_cast<unsigned char>(round), u64{4});
        WORKS("cuStreamQuery", Handle{0});
    }
    WORKS("cuCtxSetFlags", 0U);
    WORKS("cuStreamDestroy_v2", blocking);
    WORKS("cuMemFree_v2", other);
    WORKS("cuMemFree_v2", memory);
}

void events() {
    const Handle first = stream_of(stream_non_blocking), second = stream_of(stream_non_blocking);
    const Handle start = event_of(), end = event_of(), silent = event_of(event_disable_timing);
    float milliseconds = -1;
    WORKS("cuEventQuery", start); // never recorded
    ANSWERS(invalid_handle, "cuEventElapsedTime", &milliseconds, start, end);
    WORKS("cuEventRecord", start, first);
    WORKS("cuEventSynchronize", start);
    {
        Gate gate(first);
        WORKS("cuEventRecord", end, first);
        ANSWERS(not_ready, "cuEventQuery", end);
        ANSWERS(not_ready, "cuEventElapsedTime_v2", &milliseconds, start, end);
        // The second stream waits for the event of the first.
        const u64 memory = allocate(1);
        WORKS("cuStreamWaitEvent", second, end, 0U);
        WORKS("cuMemsetD8Async", memory, static_cast<unsigned char>(1), u64{1}, second);
        ANSWERS(not_ready, "cuStreamQuery", second);
        gate.open();
        WORKS("cuStreamSynchronize", second);
        WORKS("cuEventQuery", end);
        WORKS("cuMemFree_v2", memory);
    }
    WORKS("cuEventElapsedTime_v2", &milliseconds, start, end);
    CHECK(milliseconds > 0);
    WORKS("cuEventRecord", silent, first);
    WORKS("cuEventSynchronize", silent);
    ANSWERS(invalid_handle, "cuEventElapsedTime", &milliseconds, start, silent);
    ANSWERS(invalid_value, "cuEventCreate", const_cast<Handle*>(&start), 8U);
    ANSWERS(invalid_handle, "cuEventQuery", Handle{0});
    for (const Handle event : {start, end, silent}) {
        WORKS("cuEventDestroy_v2", event);
    }
    WORKS("cuStreamDestroy_v2", first);
    WORKS("cuStreamDestroy_v2", second);
}

void host_functions_may_not_call() {
    static std::atomic<int> answer{-1}, callback_status{-1};
    const Handle stream = stream_of(0);
    void (*const function)(void*) = [](void*) {
        u64 pointer = 0;
        answer = cu("cuMemAlloc_v2", &pointer, u64{1});
    };
    void (*const callback)(Handle, int, void*) = [](Handle, int status, void*) { callback_status = status; };
    WORKS("cuLaunchHostFunc", stream, function, static_cast<void*>(nullptr));
    WORKS("cuStreamAddCallback", stream, callback, static_cast<void*>(nullptr), 0U);
    WORKS("cuStreamSynchronize", stream);
    CHECK(answer == not_permitted && callback_status == success);
    ANSWERS(invalid_value, "cuLaunchHostFunc", stream, static_cast<void (*)(void*)>(nullptr),
            static_cast<void*>(nullptr));
    WORKS("cuStreamDestroy_v2", stream);
}

void what_a_stream_says() {
    Handle stream = 0, context = 0, of_stream = 0;
    WORKS("cuStreamCreateWithPriority", &stream, static_cast<unsigned>(stream_non_blocking), -99);
    unsigned flags = 0;
    int priority = 0, device = -1, status = -1;
    u64 id = 0, legacy_id = 0;
    WORKS("cuStreamGetFlags", stream, &flags);
    WORKS("cuStreamGetPriority", stream, &priority);
    WORKS("cuStreamGetDevice", stream, &device);
    WORKS("cuStreamGetCtx", stream, &of_stream);
    WORKS("cuStreamGetId", stream, &id);
    WORKS("cuStreamGetId", Handle{0}, &legacy_id);
    WORKS("cuStreamIsCapturing", stream, &status);
    WORKS("cuCtxGetCurrent", &context);
    CHECK(flags == stream_non_blocking && priority == -5 && device == 0 && status == 0);
    CHECK(of_stream == context && id != legacy_id);
    WORKS("cuStreamSynchronize", Handle{stream_per_thread});
    ANSWERS(invalid_value, "cuStreamCreate", &stream, 2U);
    ANSWERS(invalid_handle, "cuStreamSynchronize", Handle{0x99});
    ANSWERS(invalid_handle, "cuStreamDestroy_v2", Handle{0});
    WORKS("cuStreamDestroy_v2", stream);
}

// What is queued is carried out although its stream is destroyed, and the context still waits for it.
void destroyed_streams_finish() {
    const Handle stream = stream_of(stream_non_blocking);
    const u64 memory = allocate(1);
    WORKS("cuMemsetD8_v2", memory, static_cast<unsigned char>(0), u64{1});
    WORKS("cuCtxSynchronize");
    Gate gate(stream);
    WORKS("cuMemsetD8Async", memory, static_cast<unsigned char>(5), u64{1}, stream);
    WORKS("cuStreamDestroy_v2", stream);
    gate.open();
    WORKS("cuCtxSynchronize");
    CHECK(read_device(memory, 1)[0] == 5);
    WORKS("cuMemFree_v2", memory);
}

} // namespace

int main() {
    begin();
    an_asynchronous_copy_is_late();
    lateness_is_seen();
    pageable_memory_is_staged();
    the_default_stream_waits_for_blocking_streams();
    fills_are_late_unless_asked();
    events();
    host_functions_may_not_call();
    what_a_stream_says();
    destroyed_streams_finish();
}
