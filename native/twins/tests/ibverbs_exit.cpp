// Test of the software twin of libibverbs: a process ends as soon as it has polled its last receive completion. The
// twin must have sent the acknowledgement before it reports that completion, so that the send of the peer completes
// with success.
#include <sched.h>

#include <memory>
#include <thread>

#include "tests/ibverbs_support.hpp"
#include "tests/peer_process.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

// Pin the main thread and this thread to one CPU, and give this thread the lowest priority. The threads that the twin
// starts from this thread inherit both, so they run only when the main thread waits. When such a thread pushes a
// completion, the main thread preempts it at once and ends the process.
void pin_and_lower_priority() {
    cpu_set_t cpus;
    CHECK(sched_getaffinity(0, sizeof cpus, &cpus) == 0);
    int cpu = 0;
    while (CPU_ISSET(cpu, &cpus) == 0) {
        ++cpu;
    }
    CPU_ZERO(&cpus);
    CPU_SET(cpu, &cpus);
    CHECK(sched_setaffinity(getpid(), sizeof cpus, &cpus) == 0 && sched_setaffinity(0, sizeof cpus, &cpus) == 0);
    const sched_param lowest{};
    CHECK(sched_setscheduler(0, SCHED_IDLE, &lowest) == 0);
}

// The second process runs this function. It receives one message and ends at once.
int run_receiver(int socket) {
    EndpointSettings settings;
    settings.has_channel = true;
    std::unique_ptr<Endpoint> endpoint;
    // The threads of the queue pair inherit the CPU and the priority of the thread that creates the queue pair.
    std::thread([&] {
        pin_and_lower_priority();
        endpoint = std::make_unique<Endpoint>(1, settings);
    }).join();
    send_value(socket, endpoint->address());
    endpoint->connect(receive_value<QueuePairAddress>(socket));
    CHECK(ibv_req_notify_cq(endpoint->cq, 0) == 0);
    CHECK(endpoint->post_receive(1, {}) == 0);
    send_value(socket, 'r'); // ready
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    CHECK(ibv_get_cq_event(endpoint->channel, &cq, &cq_context) == 0);
    ibv_wc wc{};
    CHECK(ibv_poll_cq(cq, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    _exit(0);
}

void test_receiver_may_end_after_its_last_completion() {
    for (int round = 0; round < 5; ++round) {
        const PeerProcess peer;
        Endpoint endpoint(0);
        const auto peer_address = receive_value<QueuePairAddress>(peer.socket.get());
        send_value(peer.socket.get(), endpoint.address());
        endpoint.connect(peer_address);
        CHECK(receive_value<char>(peer.socket.get()) == 'r');
        CHECK(endpoint.post(make_request(1, IBV_WR_SEND), {}) == 0);
        endpoint.expect_completion(1, IBV_WC_SUCCESS);
        CHECK(peer.wait() == 0);
    }
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 1) {
        return run_receiver(std::atoi(arguments[1]));
    }
    test_receiver_may_end_after_its_last_completion();
    return 0;
}
