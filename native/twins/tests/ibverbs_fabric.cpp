// Tests of the software twin of libibverbs: the TCP fabric (GDRKIT_TWINS_FABRIC), over which twins on several machines
// exchange requests and datagrams. Two processes with the addresses 127.0.0.1 and 127.0.0.2 act as two machines.
#include <netinet/in.h>
#include <signal.h>

#include <random>

#include "ibverbs/wire.hpp"
#include "model/fabric.hpp"
#include "tests/ibverbs_datagram_support.hpp"
#include "tests/peer_process.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;
namespace wire = gdrkit::twin::verbs::wire;

namespace {

constexpr std::size_t memory_bytes = 3UL << 20;
constexpr const char* test_secret = "a secret of the test";

// The second process sends these data about its queue pairs and its memory to the first process.
struct Target {
    QueuePairAddress qp_address;
    std::uint64_t memory_address;
    std::uint32_t rkey;
    std::uint32_t datagram_qp_num;
};

FabricAddress make_fabric_address(const QueuePairAddress& address) {
    FabricAddress fabric_address{};
    std::memcpy(fabric_address.data(), address.gid.raw, fabric_address.size());
    return fabric_address;
}

// A second process that acts as another machine.
struct OtherMachine : PeerProcess {
    explicit OtherMachine(const char* secret = test_secret) : PeerProcess(start(secret)) {}

private:
    static PeerProcess start(const char* secret) {
        // The twin in this process has read its variables in main(), so only the new process uses these values. The
        // new process gets its own domain (name of the emulated machine), because the Unix sockets of twins of one
        // domain find each other, as on one machine.
        CHECK(setenv("GDRKIT_TWINS_FABRIC", "tcp://127.0.0.2", 1) == 0);
        CHECK(setenv("GDRKIT_TWINS_DOMAIN", ("other." + std::to_string(getpid())).c_str(), 1) == 0);
        CHECK(setenv("GDRKIT_TWINS_FABRIC_SECRET", secret, 1) == 0);
        return PeerProcess();
    }
};

// Expect a datagram of 1000 bytes with the test pattern in receive request 7, and send it back as request 8.
void return_datagram(const DatagramEndpoint& endpoint) {
    ibv_wc wc = endpoint.expect_completion(7);
    CHECK(wc.byte_len == grh_bytes + 1000 && has_pattern(endpoint.buffer->bytes + grh_bytes, 1000));
    ibv_ah* const ah = ibv_create_ah_from_wc(endpoint.pd, &wc, reinterpret_cast<ibv_grh*>(endpoint.buffer->bytes), 1);
    CHECK(ah != nullptr && endpoint.send(8, ah, wc.src_qp, grh_bytes, 1000) == 0);
    endpoint.expect_completion(8);
    CHECK(ibv_destroy_ah(ah) == 0);
}

// The second process runs this function. Its twin serves the requests of the first process until that process closes
// the socket. The second process sends 'r' (ready) once, and returns a datagram for each byte that it receives.
int run_target(int socket) {
    Endpoint endpoint(0);
    const DatagramEndpoint datagram_endpoint(0);
    Buffer memory(endpoint.pd, memory_bytes);
    send_value(socket, Target{endpoint.address(), memory.address_at(), memory.mr->rkey, datagram_endpoint.qp->qp_num});
    endpoint.connect(receive_value<QueuePairAddress>(socket));
    CHECK(endpoint.post_receive(1, {memory.sge(0, 1000)}) == 0 && datagram_endpoint.post_receive(7, 0, 4096) == 0);
    send_value(socket, 'r'); // ready
    char byte = 0;
    while (recv_all(socket, &byte, 1)) {
        return_datagram(datagram_endpoint);
    }
    return 0;
}

Target connect_to_target(Endpoint* endpoint, const PeerProcess& machine) {
    const auto target = receive_value<Target>(machine.socket.get());
    send_value(machine.socket.get(), endpoint->address());
    endpoint->connect(target.qp_address);
    CHECK(receive_value<char>(machine.socket.get()) == 'r');
    return target;
}

void test_every_operation_reaches_other_machine() {
    OtherMachine machine;
    Endpoint endpoint(0);
    const Target target = connect_to_target(&endpoint, machine);
    const QueuePairAddress own_address = endpoint.address();
    CHECK(std::memcmp(&target.qp_address.gid, &own_address.gid, sizeof(ibv_gid)) != 0);
    Buffer source(endpoint.pd, memory_bytes), readback(endpoint.pd, memory_bytes);
    fill_pattern(source.bytes, source.size_bytes);
    CHECK(endpoint.post(make_request(1, IBV_WR_SEND), {source.sge(0, 1000)}) == 0);
    CHECK(endpoint.post(make_request(2, IBV_WR_RDMA_WRITE, target.memory_address + 8, target.rkey),
                        {source.sge(8, memory_bytes - 8)}) == 0);
    ibv_send_wr atomic_request = make_request(3, IBV_WR_ATOMIC_FETCH_AND_ADD);
    atomic_request.wr.atomic.remote_addr = target.memory_address;
    atomic_request.wr.atomic.rkey = target.rkey;
    CHECK(endpoint.post(atomic_request, {readback.sge(0, 8)}) == 0);
    CHECK(endpoint.post(make_request(4, IBV_WR_RDMA_READ, target.memory_address, target.rkey),
                        {readback.sge(0, memory_bytes)}) == 0);
    for (std::uint64_t wr_id = 1; wr_id <= 4; ++wr_id) {
        endpoint.expect_completion(wr_id, IBV_WC_SUCCESS);
    }
    CHECK(has_pattern(readback.bytes, memory_bytes));
    CHECK(endpoint.post(make_request(5, IBV_WR_RDMA_READ, target.memory_address, target.rkey + 1),
                        {readback.sge(0, 8)}) == 0);
    endpoint.expect_completion(5, IBV_WC_REM_ACCESS_ERR);
    machine.socket.reset();
    CHECK(machine.wait() == 0);
}

void test_datagrams_reach_other_machine_with_the_secret() {
    OtherMachine machine;
    Endpoint endpoint(0);
    const Target target = connect_to_target(&endpoint, machine);
    const DatagramEndpoint datagram_endpoint(0);
    CHECK(datagram_endpoint.post_receive(2, 4096, 2048) == 0);
    // The twin drops a datagram without a proof of the secret. Otherwise the datagram would consume the only receive
    // request of the target.
    const Fd untrusted_socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    SocketAddress socket_address(make_fabric_address(target.qp_address),
                                 static_cast<std::uint16_t>(target.datagram_qp_num));
    // A valid datagram has a digest of 32 bytes, a header of 72 bytes and a payload. Here all bytes are 'x'.
    const std::vector<char> noise(32 + 72 + 1000, 'x');
    for (const std::size_t size_bytes : {noise.size(), std::size_t{1}, std::size_t{0}}) {
        CHECK(sendto(untrusted_socket.get(), noise.data(), size_bytes, 0, socket_address.get(),
                     socket_address.size_bytes) >= 0);
    }
    fill_pattern(datagram_endpoint.buffer->bytes, 1000);
    ibv_ah* const ah = datagram_endpoint.create_address_handle(make_path(target.qp_address.gid));
    CHECK(datagram_endpoint.send(1, ah, target.datagram_qp_num, 0, 1000) == 0);
    datagram_endpoint.expect_completion(1);
    send_value(machine.socket.get(), 'd'); // the target returns the datagram
    CHECK(datagram_endpoint.expect_completion(2).byte_len == grh_bytes + 1000);
    CHECK(has_pattern(datagram_endpoint.buffer->bytes + 4096 + grh_bytes, 1000));
    CHECK(ibv_destroy_ah(ah) == 0);
    machine.socket.reset();
    CHECK(machine.wait() == 0);
}

void test_killed_machine_exceeds_retries() {
    OtherMachine machine;
    Endpoint endpoint(0);
    const Target target = connect_to_target(&endpoint, machine);
    Buffer source(endpoint.pd, memory_bytes);
    const ibv_send_wr write = make_request(1, IBV_WR_RDMA_WRITE, target.memory_address, target.rkey);
    CHECK(endpoint.post(write, {source.sge(0, 64)}) == 0);
    endpoint.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(kill(machine.pid, SIGKILL) == 0 && WIFSIGNALED(machine.wait()));
    CHECK(endpoint.post(write, {source.sge(0, memory_bytes)}) == 0);
    endpoint.expect_completion(1, IBV_WC_RETRY_EXC_ERR);
}

void test_other_secret_is_refused() {
    OtherMachine machine("another secret of the test");
    Endpoint endpoint(0);
    connect_to_target(&endpoint, machine);
    CHECK(endpoint.post(make_request(1, IBV_WR_SEND), {}) == 0);
    endpoint.expect_completion(1, IBV_WC_RETRY_EXC_ERR);
    machine.socket.reset();
    CHECK(machine.wait() == 0);
}

// Return a socket that is connected to the port of a queue pair, without a proof of the secret.
Fd connect_untrusted(const QueuePairAddress& address) {
    SocketAddress socket_address(make_fabric_address(address), static_cast<std::uint16_t>(address.qp_num));
    Fd socket(::socket(socket_address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(socket && connect(socket.get(), socket_address.get(), socket_address.size_bytes) == 0);
    return socket;
}

// Wait for the next message. Return whether the peer has ended the connection instead.
bool has_peer_ended(const Fd& socket) {
    char byte = 0;
    return recv(socket.get(), &byte, 1, 0) <= 0;
}

// Return a socket that has proved the secret, and has completed the handshake in place of the expected peer.
Fd connect_as_peer(const QueuePairAddress& from, const QueuePairAddress& to) {
    Fd socket(
        connect_to_fabric(make_fabric_address(to), static_cast<std::uint16_t>(to.qp_num), std::chrono::seconds(1)));
    const wire::ConnectRequest connect_request{
        wire::magic, wire::version,        from.gid,   to.gid, from.qp_num, to.qp_num,
        from.psn,    IBV_GID_TYPE_ROCE_V2, IBV_QPT_RC, 0};
    wire::ConnectReply reply{};
    CHECK(socket && send_all(socket.get(), &connect_request, sizeof connect_request));
    CHECK(recv_all(socket.get(), &reply, sizeof reply) && reply.is_accepted == 1);
    return socket;
}

void test_hostile_frames_end_their_connection(unsigned frame_count) {
    OtherMachine machine;
    Endpoint endpoint(0);
    const Target target = connect_to_target(&endpoint, machine);
    {
        const Fd socket = connect_untrusted(target.qp_address);
        // The machine sends a ServerHello of 40 bytes. It expects a ClientProof of 64 bytes, and gets only 'x'.
        const std::vector<char> noise(40 + 64, 'x');
        std::vector<char> server_hello(40);
        CHECK(recv_all(socket.get(), server_hello.data(), server_hello.size()));
        CHECK(send_all(socket.get(), noise.data(), noise.size()) && has_peer_ended(socket));
        connect_untrusted(target.qp_address); // this connection ends before its handshake
    }
    wire::Request oversized_request{};
    oversized_request.magic = wire::magic;
    oversized_request.opcode = wire::Opcode::write;
    oversized_request.remote_address = target.memory_address;
    oversized_request.rkey = target.rkey;
    oversized_request.message_bytes = oversized_request.chunk_bytes = 1U << 29; // 512 MiB
    std::mt19937 random(7);
    // Every fourth frame claims a payload of 512 MiB, which is too large. In each other frame, up to three bytes are
    // damaged. Two of three frames are cut off.
    for (unsigned frame_index = 0; frame_index < frame_count; ++frame_index) {
        const Fd socket = connect_as_peer(endpoint.address(), target.qp_address);
        wire::Request frame = oversized_request;
        if (frame_index % 4 != 0) {
            frame.message_bytes = frame.chunk_bytes = 64;
            auto* const bytes = reinterpret_cast<std::uint8_t*>(&frame);
            for (unsigned damaged_count = random() % 4; damaged_count > 0; --damaged_count) {
                bytes[random() % sizeof frame] = static_cast<std::uint8_t>(random());
            }
        }
        send_all(socket.get(), &frame, frame_index % 3 == 0 ? sizeof frame : random() % sizeof frame);
        CHECK(shutdown(socket.get(), SHUT_WR) == 0);
        char reply[256];
        while (recv(socket.get(), reply, sizeof reply, 0) > 0) {
        }
    }
    // After a single oversized frame, the target's queue pair still serves this process. After many frames, it may be
    // in the error state, because a damaged frame can be a request with a wrong key.
    Buffer source(endpoint.pd, 64);
    CHECK(endpoint.post(make_request(1, IBV_WR_RDMA_WRITE, target.memory_address, target.rkey), {source.sge(0, 64)}) ==
          0);
    const ibv_wc wc = endpoint.poll_completion();
    CHECK(frame_count > 1 || wc.status == IBV_WC_SUCCESS);
    machine.socket.reset();
    CHECK(machine.wait() == 0);
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 1) {
        return run_target(std::atoi(arguments[1]));
    }
    CHECK(setenv("GDRKIT_TWINS_FABRIC", "tcp://127.0.0.1/32", 1) == 0);
    CHECK(setenv("GDRKIT_TWINS_FABRIC_SECRET", test_secret, 1) == 0);
    CHECK(config().error.empty() && config().fabric_addresses.size() == 1);
    int device_count = 0;
    // This first call makes the twin read the variables before a test changes them.
    ibv_free_device_list(ibv_get_device_list(&device_count));
    CHECK(device_count == 1);
    test_every_operation_reaches_other_machine();
    test_datagrams_reach_other_machine_with_the_secret();
    test_killed_machine_exceeds_retries();
    test_other_secret_is_refused();
    test_hostile_frames_end_their_connection(1);
    test_hostile_frames_end_their_connection(200);
    return 0;
}
