// Tests of interprocess events. Another process makes the event, and both processes record it and wait for it.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <future>

#include "cuda_peer.hpp"
#include "model/dmabuf.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

constexpr unsigned interprocess = event_interprocess | event_disable_timing;
// Messages between the processes.
constexpr char is_recorded = 'r', may_continue = 'c';

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

// Body of the process that makes the event.
int run_owner(int socket) {
    init_device();
    Handle stream = 0, opened = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 0U);
    const Handle event = create_event(interprocess);
    IpcHandle handle{};
    EXPECT_SUCCESS("cuIpcGetEventHandle", &handle, event);
    EXPECT_RESULT(invalid_context, "cuIpcOpenEventHandle", &opened, handle);
    send_value(socket, handle);
    Gate gate(stream);
    EXPECT_SUCCESS("cuEventRecord", event, stream);
    EXPECT_RESULT(not_ready, "cuEventQuery", event);
    send_value(socket, is_recorded);
    receive_value<char>(socket); // the importer has seen that the record is not done
    gate.open();
    receive_value<char>(socket); // the importer has recorded the event behind a gate
    EXPECT_RESULT(not_ready, "cuEventQuery", event);
    send_value(socket, may_continue);
    EXPECT_SUCCESS("cuStreamWaitEvent", stream, event, 0U);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    EXPECT_SUCCESS("cuEventQuery", event);
    // The test kills this process while it records.
    Gate closed_gate(stream);
    EXPECT_SUCCESS("cuEventRecord", event, stream);
    send_value(socket, is_recorded);
    receive_value<char>(socket);
    return 1;
}

void test_processes_wait_for_each_other() {
    Peer owner;
    const int socket = owner.socket();
    init_device();
    const auto handle = receive_value<IpcHandle>(socket);
    Handle event = 0, stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 0U);
    EXPECT_SUCCESS("cuIpcOpenEventHandle", &event, handle);
    IpcHandle exported_again{};
    EXPECT_RESULT(invalid_handle, "cuIpcGetEventHandle", &exported_again, event);
    CHECK(receive_value<char>(socket) == is_recorded);
    EXPECT_RESULT(not_ready, "cuEventQuery", event);
    EXPECT_SUCCESS("cuStreamWaitEvent", stream, event, 0U);
    EXPECT_RESULT(not_ready, "cuStreamQuery", stream);
    send_value(socket, may_continue);
    EXPECT_SUCCESS("cuEventSynchronize", event);
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    Gate gate(stream);
    EXPECT_SUCCESS("cuEventRecord", event, stream);
    send_value(socket, is_recorded);
    CHECK(receive_value<char>(socket) == may_continue);
    gate.open();
    CHECK(receive_value<char>(socket) == is_recorded);
    EXPECT_RESULT(not_ready, "cuEventQuery", event);
    // Work of a process that has ended does not block others.
    owner.kill_and_wait();
    EXPECT_SUCCESS("cuEventSynchronize", event);
    EXPECT_RESULT(invalid_handle, "cuIpcOpenEventHandle", &event, handle);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_invalid_arguments_are_refused() {
    Handle event = 0;
    IpcHandle handle{};
    EXPECT_RESULT(invalid_value, "cuEventCreate", &event, static_cast<unsigned>(event_interprocess));
    EXPECT_RESULT(map_failed, "cuIpcOpenEventHandle", &event, handle);
    EXPECT_RESULT(invalid_handle, "cuIpcGetEventHandle", &handle, Handle{77});
    const Handle ordinary = create_event(event_disable_timing), shared = create_event(interprocess);
    EXPECT_RESULT(invalid_handle, "cuIpcGetEventHandle", &handle, ordinary);
    EXPECT_RESULT(invalid_value, "cuIpcGetEventHandle", static_cast<IpcHandle*>(nullptr), shared);
    // A handle of memory is no handle of an event.
    const u64 memory = allocate(100);
    EXPECT_SUCCESS("cuIpcGetMemHandle", &handle, memory);
    EXPECT_RESULT(map_failed, "cuIpcOpenEventHandle", &event, handle);
    float milliseconds = 0;
    EXPECT_SUCCESS("cuEventRecord", shared, Handle{0});
    EXPECT_SUCCESS("cuEventSynchronize", shared);
    EXPECT_RESULT(invalid_handle, "cuEventElapsedTime", &milliseconds, shared, shared);
    for (const Handle each : {ordinary, shared}) {
        EXPECT_SUCCESS("cuEventDestroy_v2", each);
    }
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// An event that was never recorded is done, as an ordinary one is.
void test_event_without_record_is_done() {
    const Handle event = create_event(interprocess);
    EXPECT_SUCCESS("cuEventQuery", event);
    EXPECT_SUCCESS("cuEventSynchronize", event);
    EXPECT_SUCCESS("cuStreamWaitEvent", Handle{0}, event, 0U);
    EXPECT_SUCCESS("cuCtxSynchronize");
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
}

// A wait for a record does not end with a later record in another stream.
void test_records_are_done_in_any_order() {
    const Handle event = create_event(interprocess);
    Handle slow = 0, idle = 0, waiting = 0;
    for (Handle* const stream : {&slow, &idle, &waiting}) {
        EXPECT_SUCCESS("cuStreamCreate", stream, unsigned{stream_non_blocking});
    }
    Gate gate(slow);
    EXPECT_SUCCESS("cuEventRecord", event, slow);
    EXPECT_SUCCESS("cuStreamWaitEvent", waiting, event, 0U);
    std::promise<void> is_reached;
    EXPECT_SUCCESS(
        "cuLaunchHostFunc", waiting, +[](void* reached) { static_cast<std::promise<void>*>(reached)->set_value(); },
        static_cast<void*>(&is_reached));
    EXPECT_SUCCESS("cuEventRecord", event, idle);
    EXPECT_SUCCESS("cuEventSynchronize", event);
    auto reached = is_reached.get_future();
    CHECK(reached.wait_for(std::chrono::milliseconds(300)) == std::future_status::timeout);
    gate.open();
    reached.wait();
    EXPECT_SUCCESS("cuEventQuery", event);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    for (const Handle stream : {slow, idle, waiting}) {
        EXPECT_SUCCESS("cuStreamSynchronize", stream);
        EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    }
}

// If the system has no thread for the stream, the record fails, and nothing waits for it.
void test_failed_record_is_ended() {
    const Handle event = create_event(interprocess);
    Handle stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 0U);
    pthread_attr_t usual, huge;
    CHECK(pthread_getattr_default_np(&usual) == 0 && pthread_attr_init(&huge) == 0);
    CHECK(pthread_attr_setstacksize(&huge, std::size_t{1} << 60) == 0 && pthread_setattr_default_np(&huge) == 0);
    EXPECT_RESULT(operating_system_error, "cuEventRecord", event, stream);
    CHECK(pthread_setattr_default_np(&usual) == 0);
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
