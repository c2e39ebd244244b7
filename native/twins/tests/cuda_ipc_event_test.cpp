// Tests of the software twin of libcuda: interprocess events. Another process creates the event, and both processes
// record it and wait for it.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <future>

#include "cuda_peer.hpp"
#include "model/dmabuf.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

constexpr unsigned interprocess_flags = event_interprocess | event_disable_timing;
// The processes send each other these messages.
constexpr char event_was_recorded = 'r', may_continue = 'c';

// Blocks a stream until open() is called.
class Gate {
public:
    explicit Gate(Handle stream) { EXPECT_SUCCESS("cuLaunchHostFunc", stream, &Gate::wait, static_cast<void*>(this)); }
    void open() {
        is_open_ = true;
        is_open_.notify_all();
    }

private:
    static void wait(void* self) { static_cast<Gate*>(self)->is_open_.wait(false); }
    std::atomic<bool> is_open_{false};
};

Handle create_event(unsigned flags) {
    Handle event = 0;
    EXPECT_SUCCESS("cuEventCreate", &event, flags);
    return event;
}

// The other process, the owner of the event, runs this function.
int run_owner(int socket) {
    use_primary_context();
    Handle stream = 0, opened_event = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 0U);
    const Handle event = create_event(interprocess_flags);
    IpcHandle event_handle{};
    EXPECT_SUCCESS("cuIpcGetEventHandle", &event_handle, event);
    // A process cannot open a handle of its own event.
    EXPECT_RESULT(invalid_context, "cuIpcOpenEventHandle", &opened_event, event_handle);
    send_value(socket, event_handle);
    Gate gate(stream);
    EXPECT_SUCCESS("cuEventRecord", event, stream);
    EXPECT_RESULT(not_ready, "cuEventQuery", event);
    send_value(socket, event_was_recorded);
    receive_value<char>(socket); // the importer has checked that the record is not done
    gate.open();
    receive_value<char>(socket); // the importer has recorded the event behind a gate
    EXPECT_RESULT(not_ready, "cuEventQuery", event);
    send_value(socket, may_continue);
    EXPECT_SUCCESS("cuStreamWaitEvent", stream, event, 0U);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    EXPECT_SUCCESS("cuEventQuery", event);
    // The importer kills this process while the record of the event is not done.
    Gate closed_gate(stream);
    EXPECT_SUCCESS("cuEventRecord", event, stream);
    send_value(socket, event_was_recorded);
    receive_value<char>(socket); // never returns
    return 1;
}

void test_processes_wait_for_each_other() {
    ChildProcess owner;
    const int socket = owner.socket();
    use_primary_context();
    const auto event_handle = receive_value<IpcHandle>(socket);
    Handle event = 0, stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 0U);
    EXPECT_SUCCESS("cuIpcOpenEventHandle", &event, event_handle);
    IpcHandle unused_handle{};
    EXPECT_RESULT(invalid_handle, "cuIpcGetEventHandle", &unused_handle, event);
    CHECK(receive_value<char>(socket) == event_was_recorded);
    EXPECT_RESULT(not_ready, "cuEventQuery", event);
    EXPECT_SUCCESS("cuStreamWaitEvent", stream, event, 0U);
    EXPECT_RESULT(not_ready, "cuStreamQuery", stream);
    send_value(socket, may_continue);
    EXPECT_SUCCESS("cuEventSynchronize", event);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    Gate gate(stream);
    EXPECT_SUCCESS("cuEventRecord", event, stream);
    send_value(socket, event_was_recorded);
    CHECK(receive_value<char>(socket) == may_continue);
    gate.open();
    CHECK(receive_value<char>(socket) == event_was_recorded);
    EXPECT_RESULT(not_ready, "cuEventQuery", event);
    // Unfinished work of a process that has ended does not block other processes.
    owner.kill_and_wait();
    EXPECT_SUCCESS("cuEventSynchronize", event);
    EXPECT_RESULT(invalid_handle, "cuIpcOpenEventHandle", &event, event_handle);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_invalid_arguments_are_refused() {
    Handle event = 0;
    IpcHandle handle{};
    // An interprocess event needs the flag event_disable_timing too.
    EXPECT_RESULT(invalid_value, "cuEventCreate", &event, static_cast<unsigned>(event_interprocess));
    EXPECT_RESULT(map_failed, "cuIpcOpenEventHandle", &event, handle); // a handle of zeros
    EXPECT_RESULT(invalid_handle, "cuIpcGetEventHandle", &handle, Handle{77});
    const Handle ordinary_event = create_event(event_disable_timing), shared_event = create_event(interprocess_flags);
    EXPECT_RESULT(invalid_handle, "cuIpcGetEventHandle", &handle, ordinary_event);
    EXPECT_RESULT(invalid_value, "cuIpcGetEventHandle", static_cast<IpcHandle*>(nullptr), shared_event);
    // A handle of memory cannot be opened as a handle of an event.
    const u64 memory = allocate(100);
    EXPECT_SUCCESS("cuIpcGetMemHandle", &handle, memory);
    EXPECT_RESULT(map_failed, "cuIpcOpenEventHandle", &event, handle);
    float milliseconds = 0;
    EXPECT_SUCCESS("cuEventRecord", shared_event, Handle{0});
    EXPECT_SUCCESS("cuEventSynchronize", shared_event);
    EXPECT_RESULT(invalid_handle, "cuEventElapsedTime", &milliseconds, shared_event, shared_event);
    for (const Handle event_to_destroy : {ordinary_event, shared_event}) {
        EXPECT_SUCCESS("cuEventDestroy_v2", event_to_destroy);
    }
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// An interprocess event that was never recorded counts as done, as an ordinary event does.
void test_event_without_record_is_done() {
    const Handle event = create_event(interprocess_flags);
    EXPECT_SUCCESS("cuEventQuery", event);
    EXPECT_SUCCESS("cuEventSynchronize", event);
    EXPECT_SUCCESS("cuStreamWaitEvent", Handle{0}, event, 0U);
    EXPECT_SUCCESS("cuCtxSynchronize");
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
}

// A stream waits for the record that was the last one at the call of cuStreamWaitEvent. The wait does not end when a
// later record in another stream is done.
void test_records_are_done_in_any_order() {
    const Handle event = create_event(interprocess_flags);
    Handle slow_stream = 0, idle_stream = 0, waiting_stream = 0;
    for (Handle* const stream : {&slow_stream, &idle_stream, &waiting_stream}) {
        EXPECT_SUCCESS("cuStreamCreate", stream, unsigned{stream_non_blocking});
    }
    Gate gate(slow_stream);
    EXPECT_SUCCESS("cuEventRecord", event, slow_stream);
    EXPECT_SUCCESS("cuStreamWaitEvent", waiting_stream, event, 0U);
    std::promise<void> wait_end_promise;
    EXPECT_SUCCESS(
        "cuLaunchHostFunc", waiting_stream,
        +[](void* promise) { static_cast<std::promise<void>*>(promise)->set_value(); },
        static_cast<void*>(&wait_end_promise));
    EXPECT_SUCCESS("cuEventRecord", event, idle_stream);
    EXPECT_SUCCESS("cuEventSynchronize", event);
    auto wait_end_future = wait_end_promise.get_future();
    CHECK(wait_end_future.wait_for(std::chrono::milliseconds(300)) == std::future_status::timeout);
    gate.open();
    wait_end_future.wait();
    EXPECT_SUCCESS("cuEventQuery", event);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    for (const Handle stream : {slow_stream, idle_stream, waiting_stream}) {
        EXPECT_SUCCESS("cuStreamSynchronize", stream);
        EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    }
}

// If the twin cannot create a thread for the stream, cuEventRecord fails. Later calls do not wait for the failed
// record.
void test_failed_record_is_ended() {
    const Handle event = create_event(interprocess_flags);
    Handle stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 0U);
    // No thread can be created while the default stack size is 2^60 bytes.
    pthread_attr_t previous_attributes, huge_attributes;
    CHECK(pthread_getattr_default_np(&previous_attributes) == 0 && pthread_attr_init(&huge_attributes) == 0);
    CHECK(pthread_attr_setstacksize(&huge_attributes, std::size_t{1} << 60) == 0 &&
          pthread_setattr_default_np(&huge_attributes) == 0);
    EXPECT_RESULT(operating_system_error, "cuEventRecord", event, stream);
    CHECK(pthread_setattr_default_np(&previous_attributes) == 0);
    EXPECT_SUCCESS("cuEventQuery", event);
    EXPECT_SUCCESS("cuEventRecord", event, stream);
    EXPECT_SUCCESS("cuEventSynchronize", event);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count == 3) {
        return run_owner(std::atoi(arguments[2]));
    }
    test_processes_wait_for_each_other();
    test_invalid_arguments_are_refused();
    test_event_without_record_is_done();
    test_records_are_done_in_any_order();
    test_failed_record_is_ended();
}
