// Tests of the software twin of librdmacm: connections between processes, processes that are killed, and peers that
// send malformed requests.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <thread>

#include "model/sockets.hpp"
#include "rdmacm/wire.hpp"
#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

// One-byte messages from the server process. The port of the server follows listening_message.
constexpr char listening_message = 'l', established_message = 'e';

// The server process runs this function. It listens and, if `accepts_client` is set, accepts one client. Then it waits
// until it is killed.
int run_server(int socket, bool accepts_client) {
    const EventChannel channel;
    rdma_cm_id* const listener = create_id(channel);
    const std::uint16_t port = listen_on_address(listener, "127.0.0.1");
    CHECK(send_all(socket, &listening_message, 1) && send_all(socket, &port, sizeof port));
    if (accepts_client) {
        rdma_cm_event* const event = channel.take_event(RDMA_CM_EVENT_CONNECT_REQUEST);
        create_queue_pair(event->id);
        CHECK(rdma_accept(event->id, nullptr) == 0);
        CHECK(rdma_ack_cm_event(event) == 0);
        channel.expect_event(RDMA_CM_EVENT_ESTABLISHED);
        CHECK(send_all(socket, &established_message, 1));
    }
    for (;;) {
        pause();
    }
}

// A process that runs run_server(), and the socket that is connected to it.
struct ServerProcess {
    pid_t pid = 0;
    Fd socket;
    std::uint16_t port = 0;
    explicit ServerProcess(bool accepts_client) {
        int sockets[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
        socket = Fd(sockets[0]);
        const Fd server_socket(sockets[1]);
        std::string program_path = "/proc/self/exe", socket_text = std::to_string(sockets[1]),
                    accepts_client_text = accepts_client ? "1" : "0";
        char* arguments[] = {program_path.data(), socket_text.data(), accepts_client_text.data(), nullptr};
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addclose(&actions, sockets[0]);
        CHECK(posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, arguments, environ) == 0);
        posix_spawn_file_actions_destroy(&actions);
        char message = 0;
        CHECK(recv_all(socket.get(), &message, 1) && message == listening_message);
        CHECK(recv_all(socket.get(), &port, sizeof port));
    }
    void kill_now() {
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, nullptr, 0) == pid);
        pid = 0;
    }
    ~ServerProcess() {
        if (pid != 0) {
            kill_now();
        }
    }
    ServerProcess(const ServerProcess&) = delete;
    ServerProcess& operator=(const ServerProcess&) = delete;
};

void test_killed_peer_disconnects() {
    ServerProcess server(true);
    const EventChannel channel;
    rdma_cm_id* const id = create_id(channel);
    resolve_address_and_route(channel, id, "127.0.0.1", server.port);
    create_queue_pair(id);
    CHECK(rdma_connect(id, nullptr) == 0);
    channel.expect_event(RDMA_CM_EVENT_ESTABLISHED);
    char message = 0;
    CHECK(recv_all(server.socket.get(), &message, 1) && message == established_message);
    server.kill_now();
    channel.expect_event(RDMA_CM_EVENT_DISCONNECTED);
    channel.expect_event(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    rdma_destroy_qp(id);
    CHECK(rdma_destroy_id(id) == 0);
}

// When a process is killed, the kernel destroys its identifiers and rejects its pending requests. The twin does the
// same.
void test_killed_listener_rejects_and_frees_its_port() {
    ServerProcess server(false);
    const EventChannel channel;
    rdma_cm_id* const id = create_id(channel);
    resolve_address_and_route(channel, id, "127.0.0.1", server.port);
    create_queue_pair(id);
    rdma_cm_id* const second_id = create_id(channel);
    CHECK_FAILS(rdma_bind_addr(second_id, IpEndpoint("127.0.0.1", server.port)), EADDRINUSE);
    CHECK(rdma_connect(id, nullptr) == 0);
    CHECK(!channel.is_readable(50));
    server.kill_now();
    channel.expect_event(RDMA_CM_EVENT_REJECTED, rejected_by_program_status);
    CHECK(rdma_bind_addr(second_id, IpEndpoint("127.0.0.1", server.port)) == 0);
    rdma_destroy_qp(id);
    CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(second_id) == 0);
}

// Return the name of the socket on which the identifier listens, as list_listener_names() in rdmacm/ports.cpp forms it:
// cm.GID.tPORT.HASH. The letter t means RDMA_PS_TCP. HASH is the FNV-1a hash of the IPv4 address, mapped to IPv6.
std::string make_listener_name(rdma_cm_id* id) {
    std::string listener_name = "cm.";
    char hex_digits[16];
    std::uint32_t hash = 0x811c9dc5U;
    for (const std::uint8_t byte : id->route.addr.addr.ibaddr.sgid.raw) {
        std::snprintf(hex_digits, sizeof hex_digits, "%02x", byte);
        listener_name += hex_digits;
    }
    std::uint8_t mapped_address[16]{};
    mapped_address[10] = mapped_address[11] = 0xff;
    std::memcpy(mapped_address + 12, &id->route.addr.src_sin.sin_addr, 4);
    for (const std::uint8_t byte : mapped_address) {
        hash = (hash ^ byte) * 0x01000193U;
    }
    char port_and_hash[16];
    std::snprintf(port_and_hash, sizeof port_and_hash, ".t%04x.%08x", ntohs(rdma_get_src_port(id)), hash);
    return listener_name + port_and_hash;
}

// Return a valid request to this identifier, as the connection manager of a peer would send it. Its private data is
// empty.
wire::Message make_connect_request(rdma_cm_id* id) {
    wire::Message message{};
    message.magic = wire::magic;
    message.version = wire::version;
    message.type = wire::Type::request;
    message.port_space = RDMA_PS_TCP;
    message.family = AF_INET;
    message.dst_port = ntohs(rdma_get_src_port(id));
    // The address is an IPv4 address that is mapped to IPv6.
    message.dst_ip[10] = message.dst_ip[11] = 0xff;
    std::memcpy(message.dst_ip.data() + 12, &id->route.addr.src_sin.sin_addr, 4);
    message.src_ip = message.dst_ip;
    return message;
}

// Return whether the listener ends the connection without a reply.
bool listener_drops(const std::string& listener_name, const void* bytes, std::size_t size_bytes) {
    const Fd peer(connect_to(listener_name));
    CHECK(peer && send_all(peer.get(), bytes, size_bytes));
    char reply = 0;
    return !recv_all(peer.get(), &reply, 1);
}

void test_malformed_requests_affect_no_other_peer() {
    ConnectionPair pair;
    const std::string listener_name = make_listener_name(pair.listener);
    const wire::Message valid_request = make_connect_request(pair.listener);
    const auto drops_changed_request = [&](auto change) {
        wire::Message message = valid_request;
        change(&message);
        return listener_drops(listener_name, &message, sizeof message);
    };
    // Each change makes one field invalid: a queue pair number has 24 bits, a request has at most 56 bytes of private
    // data, and the bytes after the private data are zeros.
    CHECK(drops_changed_request([](wire::Message* message) { message->magic ^= 1; }));
    CHECK(drops_changed_request([](wire::Message* message) { message->version = 2; }));
    CHECK(drops_changed_request([](wire::Message* message) { message->type = static_cast<wire::Type>(9); }));
    CHECK(drops_changed_request([](wire::Message* message) { message->type = wire::Type::reply; }));
    CHECK(drops_changed_request([](wire::Message* message) { message->port_space = 1; }));
    CHECK(drops_changed_request([](wire::Message* message) { message->qp_num = 1 << 24; }));
    CHECK(drops_changed_request([](wire::Message* message) { message->family = AF_UNIX; }));
    CHECK(drops_changed_request([](wire::Message* message) { message->private_bytes = 57; }));
    CHECK(drops_changed_request([](wire::Message* message) { message->private_data[3] = 1; }));
    CHECK(drops_changed_request([](wire::Message* message) { message->reserved[0] = 1; }));
    // Many peers that send only half of a request do not delay the legitimate peer.
    std::vector<Fd> stalled_peers;
    for (int count = 0; count < 100; ++count) {
        stalled_peers.emplace_back(connect_to(listener_name));
        CHECK(stalled_peers.back() && send_all(stalled_peers.back().get(), &valid_request, sizeof valid_request / 2));
    }
    pair.establish();
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 2) { // ServerProcess has started this program
        return run_server(std::atoi(arguments[1]), arguments[2][0] == '1');
    }
    test_killed_peer_disconnects();
    test_killed_listener_rejects_and_frees_its_port();
    test_malformed_requests_affect_no_other_peer();
    return 0;
}
