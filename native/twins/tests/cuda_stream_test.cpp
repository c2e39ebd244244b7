// Tests of the software twin of libcuda: the work of streams is delayed, and ordered by streams and events exactly as
// CUDA guarantees.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr std::chrono::microseconds delay_max(10000);

// Blocks a stream: work that is queued after the gate does not run before open().
class Gate {
public:
    explicit Gate(Handle stream) { EXPECT_SUCCESS("cuLaunchHostFunc", stream, &Gate::wait, static_cast<void*>(this)); }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;
    void open() {
        std::lock_guard lock(mutex_);
        is_open_ = true;
        opened_.notify_all();
    }

private:
    static void wait(void* self) {
        auto* const gate = static_cast<Gate*>(self);
        std::unique_lock lock(gate->mutex_);
        gate->opened_.wait(lock, [=] { return gate->is_open_; });
    }
    std::mutex mutex_;
    std::condition_variable opened_;
    bool is_open_ = false;
};

Handle create_stream(unsigned flags) {
    Handle stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, flags);
    return stream;
}

Handle create_event(unsigned flags = 0) {
    Handle event = 0;
    EXPECT_SUCCESS("cuEventCreate", &event, flags);
    return event;
}

unsigned char* allocate_pinned(u64 length_bytes) {
    void* host_memory = nullptr;
    EXPECT_SUCCESS("cuMemHostAlloc", &host_memory, length_bytes, 0U);
    return static_cast<unsigned char*>(host_memory);
}

// An asynchronous copy is not done when its call returns, and is done after a wait for the stream.
void test_async_copy_is_delayed() {
    const Handle stream = create_stream(stream_non_blocking);
    const u64 memory = allocate(1000);
    unsigned char* const host_memory = allocate_pinned(1000);
    write_device(memory, std::vector<unsigned char>(1000, 8));
    Gate gate(stream);
    EXPECT_SUCCESS("cuMemcpyDtoHAsync_v2", static_cast<void*>(host_memory), memory, u64{1000}, stream);
    CHECK(host_memory[0] == 0 && host_memory[999] == 0);
    EXPECT_RESULT(not_ready, "cuStreamQuery", stream);
    gate.open();
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    EXPECT_SUCCESS("cuStreamQuery", stream);
    CHECK(host_memory[0] == 8 && host_memory[999] == 8);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    EXPECT_SUCCESS("cuMemFreeHost", static_cast<void*>(host_memory));
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// The mean delay is half of the largest delay, which main() sets. The sum of 20 random delays is almost certainly more
// than a quarter of the expected sum, which is `round_count * delay_max / 2`.
void test_work_is_delayed_at_random() {
    constexpr int round_count = 20;
    const Handle stream = create_stream(stream_non_blocking);
    const u64 memory = allocate(8);
    unsigned char* const host_memory = allocate_pinned(8);
    const auto begin = std::chrono::steady_clock::now();
    for (int round = 0; round < round_count; ++round) {
        EXPECT_SUCCESS("cuMemcpyDtoHAsync_v2", static_cast<void*>(host_memory), memory, u64{8}, stream);
        EXPECT_SUCCESS("cuStreamSynchronize", stream);
    }
    CHECK(std::chrono::steady_clock::now() - begin > round_count * delay_max / 8);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    EXPECT_SUCCESS("cuMemFreeHost", static_cast<void*>(host_memory));
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// An asynchronous copy call returns only after it has read pageable source memory, or has written pageable destination
// memory.
void test_pageable_memory_is_staged() {
    const Handle stream = create_stream(stream_non_blocking);
    const u64 memory = allocate(100);
    std::vector<unsigned char> source_bytes(100, 6), target_bytes(100, 0);
    {
        Gate gate(stream);
        EXPECT_SUCCESS("cuMemcpyHtoDAsync_v2", memory, static_cast<const void*>(source_bytes.data()), u64{100}, stream);
        source_bytes.assign(100, 1);
        gate.open();
        EXPECT_SUCCESS("cuMemcpyDtoHAsync_v2", static_cast<void*>(target_bytes.data()), memory, u64{100}, stream);
        CHECK(target_bytes[0] == 6 && target_bytes[99] == 6);
    }
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

void test_default_stream_waits_for_blocking_streams() {
    const Handle blocking_stream = create_stream(0), non_blocking_stream = create_stream(stream_non_blocking);
    const u64 memory = allocate(4);
    Gate gate(blocking_stream);
    EXPECT_SUCCESS("cuMemsetD8Async", memory, static_cast<unsigned char>(1), u64{4}, blocking_stream);
    EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(2), u64{4});
    EXPECT_RESULT(not_ready, "cuStreamQuery", Handle{0});
    // The default stream now waits for the gate. A non-blocking stream does not wait. Another blocking stream waits for
    // the default stream.
    EXPECT_SUCCESS("cuMemsetD8Async", memory, static_cast<unsigned char>(3), u64{4}, non_blocking_stream);
    EXPECT_SUCCESS("cuStreamSynchronize", non_blocking_stream);
    const Handle second_blocking_stream = create_stream(0);
    EXPECT_SUCCESS("cuMemsetD8Async", memory + 1, static_cast<unsigned char>(4), u64{1}, second_blocking_stream);
    EXPECT_RESULT(not_ready, "cuStreamQuery", second_blocking_stream);
    gate.open();
    EXPECT_SUCCESS("cuCtxSynchronize");
    CHECK((read_device(memory, 4) == std::vector<unsigned char>{2, 4, 2, 2}));
    for (const Handle stream : {blocking_stream, non_blocking_stream, second_blocking_stream}) {
        EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    }
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// A memset returns before it is done, unless CU_POINTER_ATTRIBUTE_SYNC_MEMOPS is set for the memory, or
// CU_CTX_SYNC_MEMOPS is set for the current context.
void test_memset_is_async_unless_sync_memops() {
    // A gate in a blocking stream also blocks the default stream.
    const Handle blocking_stream = create_stream(0);
    const u64 memory = allocate(4);
    Gate gate(blocking_stream);
    EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(7), u64{4});
    EXPECT_SUCCESS("cuMemcpyDtoD_v2", memory, memory + 2, u64{2});
    EXPECT_RESULT(not_ready, "cuStreamQuery", Handle{0});
    gate.open();
    EXPECT_SUCCESS("cuStreamSynchronize", Handle{0});
    const unsigned sync_memops = 1;
    EXPECT_SUCCESS("cuPointerSetAttribute", static_cast<const void*>(&sync_memops),
                   static_cast<int>(pointer_sync_memops), memory);
    for (int round = 0; round < 10; ++round) {
        EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(round), u64{4});
        EXPECT_SUCCESS("cuStreamQuery", Handle{0});
    }
    EXPECT_SUCCESS("cuCtxSetFlags", static_cast<unsigned>(context_sync_memops));
    const u64 second_memory = allocate(4);
    for (int round = 0; round < 10; ++round) {
        EXPECT_SUCCESS("cuMemsetD8_v2", second_memory, static_cast<unsigned char>(round), u64{4});
        EXPECT_SUCCESS("cuStreamQuery", Handle{0});
    }
    EXPECT_SUCCESS("cuCtxSetFlags", 0U);
    EXPECT_SUCCESS("cuStreamDestroy_v2", blocking_stream);
    EXPECT_SUCCESS("cuMemFree_v2", second_memory);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

void test_event_completes_after_earlier_work() {
    const Handle first_stream = create_stream(stream_non_blocking), second_stream = create_stream(stream_non_blocking);
    const Handle start_event = create_event(), end_event = create_event(),
                 untimed_event = create_event(event_disable_timing);
    float milliseconds = -1;
    EXPECT_SUCCESS("cuEventQuery", start_event); // an event that was never recorded counts as complete
    EXPECT_RESULT(invalid_handle, "cuEventElapsedTime", &milliseconds, start_event, end_event);
    EXPECT_SUCCESS("cuEventRecord", start_event, first_stream);
    EXPECT_SUCCESS("cuEventSynchronize", start_event);
    {
        Gate gate(first_stream);
        EXPECT_SUCCESS("cuEventRecord", end_event, first_stream);
        EXPECT_RESULT(not_ready, "cuEventQuery", end_event);
        EXPECT_RESULT(not_ready, "cuEventElapsedTime_v2", &milliseconds, start_event, end_event);
        // The second stream waits for an event in the first stream.
        const u64 memory = allocate(1);
        EXPECT_SUCCESS("cuStreamWaitEvent", second_stream, end_event, 0U);
        EXPECT_SUCCESS("cuMemsetD8Async", memory, static_cast<unsigned char>(1), u64{1}, second_stream);
        EXPECT_RESULT(not_ready, "cuStreamQuery", second_stream);
        gate.open();
        EXPECT_SUCCESS("cuStreamSynchronize", second_stream);
        EXPECT_SUCCESS("cuEventQuery", end_event);
        EXPECT_SUCCESS("cuMemFree_v2", memory);
    }
    EXPECT_SUCCESS("cuEventElapsedTime_v2", &milliseconds, start_event, end_event);
    CHECK(milliseconds > 0);
    EXPECT_SUCCESS("cuEventRecord", untimed_event, first_stream);
    EXPECT_SUCCESS("cuEventSynchronize", untimed_event);
    EXPECT_RESULT(invalid_handle, "cuEventElapsedTime", &milliseconds, start_event, untimed_event);
    EXPECT_RESULT(invalid_value, "cuEventCreate", const_cast<Handle*>(&start_event), 8U); // not a flag
    EXPECT_RESULT(invalid_handle, "cuEventQuery", Handle{0});
    for (const Handle event : {start_event, end_event, untimed_event}) {
        EXPECT_SUCCESS("cuEventDestroy_v2", event);
    }
    EXPECT_SUCCESS("cuStreamDestroy_v2", first_stream);
    EXPECT_SUCCESS("cuStreamDestroy_v2", second_stream);
}

void test_host_function_must_not_call_driver() {
    static std::atomic<int> allocate_result{-1}, callback_status{-1};
    const Handle stream = create_stream(0);
    void (*const function)(void*) = [](void*) {
        u64 pointer = 0;
        allocate_result = call_driver("cuMemAlloc_v2", &pointer, u64{1});
    };
    void (*const callback)(Handle, int, void*) = [](Handle, int status, void*) { callback_status = status; };
    EXPECT_SUCCESS("cuLaunchHostFunc", stream, function, static_cast<void*>(nullptr));
    EXPECT_SUCCESS("cuStreamAddCallback", stream, callback, static_cast<void*>(nullptr), 0U);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    CHECK(allocate_result == not_permitted && callback_status == success);
    EXPECT_RESULT(invalid_value, "cuLaunchHostFunc", stream, static_cast<void (*)(void*)>(nullptr),
                  static_cast<void*>(nullptr));
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_stream_queries_return_properties() {
    Handle stream = 0, context = 0, stream_context = 0;
    // The driver replaces a priority out of range by the nearest allowed priority, here -5.
    EXPECT_SUCCESS("cuStreamCreateWithPriority", &stream, static_cast<unsigned>(stream_non_blocking), -99);
    unsigned flags = 0;
    int priority = 0, device = -1, capture_status = -1;
    u64 stream_id = 0, default_stream_id = 0;
    EXPECT_SUCCESS("cuStreamGetFlags", stream, &flags);
    EXPECT_SUCCESS("cuStreamGetPriority", stream, &priority);
    EXPECT_SUCCESS("cuStreamGetDevice", stream, &device);
    EXPECT_SUCCESS("cuStreamGetCtx", stream, &stream_context);
    EXPECT_SUCCESS("cuStreamGetId", stream, &stream_id);
    EXPECT_SUCCESS("cuStreamGetId", Handle{0}, &default_stream_id);
    EXPECT_SUCCESS("cuStreamIsCapturing", stream, &capture_status);
    EXPECT_SUCCESS("cuCtxGetCurrent", &context);
    // 0 is CU_STREAM_CAPTURE_STATUS_NONE.
    CHECK(flags == stream_non_blocking && priority == -5 && device == 0 && capture_status == 0);
    CHECK(stream_context == context && stream_id != default_stream_id);
    EXPECT_SUCCESS("cuStreamSynchronize", Handle{per_thread_stream_handle});
    EXPECT_RESULT(invalid_value, "cuStreamCreate", &stream, 2U); // not a flag
    EXPECT_RESULT(invalid_handle, "cuStreamSynchronize", Handle{0x99});
    EXPECT_RESULT(invalid_handle, "cuStreamDestroy_v2", Handle{0});
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// A stream waits for a word of device memory that another stream writes. The GPU of the twin does not support the flag
// CU_STREAM_WAIT_VALUE_FLUSH.
void test_stream_waits_for_a_value() {
    const Handle stream = create_stream(stream_non_blocking), writer_stream = create_stream(stream_non_blocking);
    const u64 memory = allocate(8);
    write_device(memory, std::vector<unsigned char>(8, 0));
    EXPECT_SUCCESS("cuStreamWaitValue32_v2", stream, memory, 7U, unsigned{wait_eq});
    EXPECT_SUCCESS("cuMemsetD8Async", memory + 4, static_cast<unsigned char>(5), u64{1}, stream);
    EXPECT_RESULT(not_ready, "cuStreamQuery", stream);
    EXPECT_SUCCESS("cuMemsetD32Async", memory, 7U, u64{1}, writer_stream);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    CHECK(read_device(memory + 4, 1)[0] == 5);
    // The word is 7 now, so all these waits end: 7 >= 6, 7 & 2 is not 0, and ~(7 | 0) is not 0.
    for (const auto& [value, flags] : {std::pair{6U, wait_geq}, std::pair{2U, wait_and}, std::pair{0U, wait_nor}}) {
        EXPECT_SUCCESS("cuStreamWaitValue32_v2", stream, memory, value, unsigned{flags});
    }
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    EXPECT_RESULT(not_supported, "cuStreamWaitValue32_v2", stream, memory, 7U, unsigned{wait_flush});
    EXPECT_RESULT(invalid_value, "cuStreamWaitValue32_v2", stream, memory + 1, 7U, unsigned{wait_eq});
    EXPECT_RESULT(invalid_value, "cuStreamWaitValue32_v2", stream, memory, 7U, 4U); // 4 is not a condition
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    EXPECT_SUCCESS("cuStreamDestroy_v2", writer_stream);
}

// Queued work still runs after its stream is destroyed, and a wait for the context includes this work.
void test_destroyed_stream_finishes() {
    const Handle stream = create_stream(stream_non_blocking);
    const u64 memory = allocate(1);
    EXPECT_SUCCESS("cuMemsetD8_v2", memory, static_cast<unsigned char>(0), u64{1});
    EXPECT_SUCCESS("cuCtxSynchronize");
    Gate gate(stream);
    EXPECT_SUCCESS("cuMemsetD8Async", memory, static_cast<unsigned char>(5), u64{1}, stream);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    gate.open();
    EXPECT_SUCCESS("cuCtxSynchronize");
    CHECK(read_device(memory, 1)[0] == 5);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// cuMemcpyPeer runs its copy after all earlier work, and before all later work, of three contexts: the current context
// and both contexts in its arguments. This is true even for streams that do not wait for the default stream. The call
// does not wait for the copy. In this test, the arguments name the second context twice, and the first context is
// current.
void test_peer_copy_waits_for_all_streams() {
    constexpr u64 length_bytes = 100;
    Handle first_context = 0, second_context = 0;
    EXPECT_SUCCESS("cuCtxGetCurrent", &first_context);
    const Handle stream = create_stream(stream_non_blocking);
    const u64 source_memory = allocate(length_bytes);
    EXPECT_SUCCESS("cuMemsetD8_v2", source_memory, static_cast<unsigned char>(1), length_bytes);
    EXPECT_SUCCESS("cuCtxSynchronize");
    Gate gate(stream);
    EXPECT_SUCCESS("cuMemsetD8Async", source_memory, static_cast<unsigned char>(2), length_bytes, stream);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &second_context, 1);
    EXPECT_SUCCESS("cuCtxPushCurrent_v2", second_context);
    const Handle reader_stream = create_stream(stream_non_blocking);
    const u64 target_memory = allocate(length_bytes);
    void* host_memory = nullptr;
    EXPECT_SUCCESS("cuMemHostAlloc", &host_memory, length_bytes, 0U);
    EXPECT_SUCCESS("cuCtxSetCurrent", first_context);
    EXPECT_SUCCESS("cuMemcpyPeer", target_memory, second_context, source_memory, second_context, length_bytes);
    EXPECT_SUCCESS("cuCtxSetCurrent", second_context);
    EXPECT_SUCCESS("cuMemcpyDtoHAsync_v2", host_memory, target_memory, length_bytes, reader_stream);
    // Without a wait for the peer copy, the copy in `reader_stream` would be done within this time.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    while (std::chrono::steady_clock::now() < deadline) {
        EXPECT_RESULT(not_ready, "cuStreamQuery", reader_stream);
    }
    gate.open();
    EXPECT_SUCCESS("cuStreamSynchronize", reader_stream);
    CHECK(static_cast<unsigned char*>(host_memory)[length_bytes - 1] == 2);
    EXPECT_SUCCESS("cuMemFreeHost", host_memory);
    EXPECT_SUCCESS("cuMemFree_v2", target_memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", reader_stream);
    EXPECT_SUCCESS("cuCtxPopCurrent_v2", &second_context);
    EXPECT_SUCCESS("cuCtxPushCurrent_v2", first_context);
    EXPECT_SUCCESS("cuMemFree_v2", source_memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 1);
}

// cuThreadExchangeStreamCaptureMode sets the mode of the calling thread and returns the previous mode. The mode of a
// new thread is global.
void test_capture_mode_belongs_to_the_thread() {
    int mode = capture_mode_relaxed;
    EXPECT_SUCCESS("cuThreadExchangeStreamCaptureMode", &mode);
    CHECK(mode == capture_mode_global);
    std::thread([] {
        int mode_of_thread = capture_mode_thread_local;
        EXPECT_SUCCESS("cuThreadExchangeStreamCaptureMode", &mode_of_thread);
        CHECK(mode_of_thread == capture_mode_global);
    }).join();
    EXPECT_SUCCESS("cuThreadExchangeStreamCaptureMode", &mode);
    CHECK(mode == capture_mode_relaxed);
    for (int invalid_mode : {-1, 3}) {
        EXPECT_RESULT(invalid_value, "cuThreadExchangeStreamCaptureMode", &invalid_mode);
    }
    EXPECT_RESULT(invalid_value, "cuThreadExchangeStreamCaptureMode", static_cast<int*>(nullptr));
}

} // namespace

int main() {
    // Delay 100 % of the work, by at most `delay_max`.
    CHECK(setenv("GDRKIT_TWINS_LATE_SHARE", "100", 1) == 0);
    CHECK(setenv("GDRKIT_TWINS_LATE_US", std::to_string(delay_max.count()).c_str(), 1) == 0);
    use_primary_context();
    test_async_copy_is_delayed();
    test_work_is_delayed_at_random();
    test_pageable_memory_is_staged();
    test_default_stream_waits_for_blocking_streams();
    test_memset_is_async_unless_sync_memops();
    test_event_completes_after_earlier_work();
    test_host_function_must_not_call_driver();
    test_stream_queries_return_properties();
    test_stream_waits_for_a_value();
    test_destroyed_stream_finishes();
    test_peer_copy_waits_for_all_streams();
    test_capture_mode_belongs_to_the_thread();
}
