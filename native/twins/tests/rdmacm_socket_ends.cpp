// Tests of the software twin of librdmacm: the end of stream rsockets. The tests check what rpoll, rselect and other
// calls report when the peer, in another process, shuts down, closes, is killed or refuses the connection. The expected
// events are the events of rdma-core's rsocket.c.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/select.h>

#include <chrono>
#include <thread>
#include <utility>

#include "tests/peer_process.hpp"
#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t data_bytes = 100'000; // more than one buffer of the stream
constexpr int wait_max_ms = 30'000;

// The first process sends these commands to the second process, which replies with is_done.
constexpr char shut_reads = 'r', shut_writes = 'w', shut_both = 'b', close_socket = 'c', send_data = 's',
               receive_byte = '1', query_events = 'p', send_and_end = 'e', receive_data = 'D', is_done = 'd';

// Return the events that rpoll reports without a wait: some of POLLIN, POLLOUT, POLLHUP and POLLERR.
short query_events_now(int socket) {
    pollfd descriptor{socket, POLLIN | POLLOUT, 0};
    CHECK(rpoll(&descriptor, 1, 0) >= 0);
    return descriptor.revents;
}

// Sleep in rpoll until it reports one of these events, and return the reported events (0 after the timeout). POLLHUP
// and POLLERR always end the sleep.
short wait_for_events(int socket, short events, int timeout_ms = wait_max_ms) {
    pollfd descriptor{socket, events, 0};
    CHECK(rpoll(&descriptor, 1, timeout_ms) >= 0);
    return descriptor.revents;
}

// Return the errno of the last failure (SO_ERROR), and clear it.
int take_socket_error(int socket) {
    int error = -1;
    socklen_t length = sizeof error;
    CHECK(rgetsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && length == sizeof error);
    return error;
}

// Sleep in rpoll, without a request for other events, until it reports POLLHUP or POLLERR. Check that it reports
// `event`.
void expect_hangup_or_error(int socket, short event) {
    const short reported_events = wait_for_events(socket, 0);
    if (reported_events != event) {
        std::fprintf(stderr, "expected the event %#x, got %#x and the error %d\n", event, reported_events,
                     take_socket_error(socket));
    }
    CHECK(reported_events == event);
}

// Query until rpoll reports exactly these events. Some events come a little later than the call that causes them.
void expect_exact_events(int socket, short events) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_max_ms);
    while (query_events_now(socket) != events) {
        if (std::chrono::steady_clock::now() >= deadline) {
            std::fprintf(stderr, "expected the events %#x, got %#x\n", events, query_events_now(socket));
        }
        CHECK(std::chrono::steady_clock::now() < deadline);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

void expect_end_of_data(int socket) {
    char byte = 0;
    CHECK(rrecv(socket, &byte, 1, 0) == 0);
}

// Wait until `data_bytes` bytes have arrived, without receiving them.
void wait_for_data(int socket) {
    std::vector<std::uint8_t> bytes(data_bytes);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_max_ms);
    while (rrecv(socket, bytes.data(), bytes.size(), MSG_PEEK) != static_cast<ssize_t>(data_bytes)) {
        CHECK(std::chrono::steady_clock::now() < deadline);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// Receive `data_bytes` bytes, and check that they have the pattern of fill_pattern().
void expect_data(int socket) {
    std::vector<std::uint8_t> bytes(data_bytes);
    const ssize_t received_bytes = rrecv(socket, bytes.data(), bytes.size(), MSG_WAITALL);
    if (received_bytes != static_cast<ssize_t>(data_bytes)) {
        std::fprintf(stderr, "received %zd of %zu bytes (%s)\n", received_bytes, data_bytes,
                     received_bytes < 0 ? std::strerror(errno) : "no error");
    }
    CHECK(received_bytes == static_cast<ssize_t>(data_bytes));
    CHECK(has_pattern(bytes.data(), data_bytes));
}

// The second process runs this function. It accepts one connection if the first process asks for it, and executes
// commands.
int run_peer(int control_socket) {
    const int listener = rsocket(AF_INET, SOCK_STREAM, 0);
    IpEndpoint address("127.0.0.1");
    socklen_t length = sizeof address.storage;
    CHECK(rbind(listener, address, sizeof(sockaddr_in)) == 0 && rlisten(listener, 4) == 0);
    CHECK(rgetsockname(listener, address, &length) == 0);
    send_value(control_socket, address.storage);
    int socket = receive_value<bool>(control_socket) ? raccept(listener, nullptr, nullptr) : -1;
    std::vector<std::uint8_t> data(data_bytes);
    fill_pattern(data.data(), data.size());
    char command = 0, byte = 0;
    while (recv_all(control_socket, &command, 1)) {
        switch (command) {
        case shut_reads:
            CHECK(rshutdown(socket, SHUT_RD) == 0);
            break;
        case shut_writes:
            CHECK(rshutdown(socket, SHUT_WR) == 0);
            break;
        case shut_both:
            CHECK(rshutdown(socket, SHUT_RDWR) == 0);
            break;
        case close_socket:
            CHECK(rclose(std::exchange(socket, -1)) == 0);
            break;
        case send_data:
            CHECK(rsend(socket, data.data(), data.size(), 0) == static_cast<ssize_t>(data.size()));
            break;
        case send_and_end:
            CHECK(rsend(socket, data.data(), data.size(), 0) == static_cast<ssize_t>(data.size()));
            CHECK(rshutdown(socket, SHUT_WR) == 0);
            break;
        case receive_data:
            expect_data(socket);
            expect_end_of_data(socket);
            break;
        case receive_byte:
            CHECK(rrecv(socket, &byte, 1, 0) == 1);
            break;
        case query_events:
            send_value(control_socket, query_events_now(socket));
            break;
        default:
            return 1;
        }
        send_value(control_socket, is_done);
    }
    CHECK((socket < 0 || rclose(socket) == 0) && rclose(listener) == 0);
    return 0;
}

// A client rsocket, and its peer in the second process.
struct Stream {
    PeerProcess process;
    sockaddr_storage peer_address = receive_value<sockaddr_storage>(process.socket.get());
    int client = rsocket(AF_INET, SOCK_STREAM, 0);

    explicit Stream(bool must_connect = true) {
        CHECK(client >= 0);
        send_value(process.socket.get(), must_connect);
        CHECK(!must_connect || connect() == 0);
    }
    ~Stream() {
        CHECK(rclose(client) == 0);
        process.socket.reset();
        if (process.pid != 0) {
            CHECK(process.wait() == 0);
        }
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    int connect() { return rconnect(client, reinterpret_cast<sockaddr*>(&peer_address), sizeof(sockaddr_in)); }
    void command_peer(char command) {
        send_value(process.socket.get(), command);
        CHECK(receive_value<char>(process.socket.get()) == is_done);
    }
    short query_peer_events() {
        send_value(process.socket.get(), query_events);
        const auto events = receive_value<short>(process.socket.get());
        CHECK(receive_value<char>(process.socket.get()) == is_done);
        return events;
    }
    void expect_peer_events(short events) {
        short reported_events = 0;
        for (int attempt = 0; attempt < wait_max_ms && (reported_events = query_peer_events()) != events; ++attempt) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        CHECK(reported_events == events);
    }
    void kill_peer() {
        CHECK(kill(process.pid, SIGKILL) == 0 && waitpid(process.pid, nullptr, 0) == process.pid);
        process.pid = 0;
    }
    // Check the state after the connection has ended without an error.
    void expect_disconnected() {
        expect_exact_events(client, POLLIN | POLLOUT | POLLHUP);
        expect_end_of_data(client);
        CHECK_FAILS(rsend(client, "x", 1, 0), ECONNRESET);
        CHECK(take_socket_error(client) == 0);
        CHECK_FAILS(connect(), ENOTCONN);
        CHECK(rshutdown(client, SHUT_RDWR) == 0);
    }
};

void test_end_of_the_peers_writes_is_not_a_hangup() {
    Stream stream;
    expect_exact_events(stream.client, POLLOUT);
    stream.command_peer(send_data);
    stream.command_peer(shut_writes);
    expect_data(stream.client);
    CHECK(wait_for_events(stream.client, POLLIN) == POLLIN);
    expect_end_of_data(stream.client);
    expect_exact_events(stream.client, POLLIN | POLLOUT);
    CHECK(wait_for_events(stream.client, 0, 150) == 0); // neither POLLHUP nor POLLERR
    CHECK(rsend(stream.client, "x", 1, 0) == 1);
    stream.command_peer(receive_byte);
    // The end of the second direction ends the connection for both sides.
    CHECK(rshutdown(stream.client, SHUT_WR) == 0);
    CHECK(query_events_now(stream.client) == (POLLIN | POLLOUT | POLLHUP));
    stream.expect_peer_events(POLLIN | POLLOUT | POLLHUP);
    stream.expect_disconnected();
}

void test_ends_of_both_directions_at_once_lose_no_data() {
    std::vector<std::uint8_t> data(data_bytes);
    fill_pattern(data.data(), data.size());
    for (int round = 0; round < 20; ++round) {
        Stream stream;
        send_value(stream.process.socket.get(), send_and_end);
        CHECK(rsend(stream.client, data.data(), data.size(), 0) == static_cast<ssize_t>(data.size()));
        CHECK(rshutdown(stream.client, SHUT_WR) == 0);
        CHECK(receive_value<char>(stream.process.socket.get()) == is_done);
        expect_data(stream.client);
        expect_end_of_data(stream.client);
        stream.command_peer(receive_data);
    }
}

void test_own_end_of_writes_lets_the_peer_send() {
    Stream stream;
    CHECK(rshutdown(stream.client, SHUT_WR) == 0);
    CHECK_FAILS(rsend(stream.client, "x", 1, 0), ECONNRESET);
    stream.expect_peer_events(POLLIN | POLLOUT);
    stream.command_peer(send_data);
    expect_data(stream.client);
    expect_exact_events(stream.client, POLLOUT);
    stream.command_peer(shut_writes);
    expect_hangup_or_error(stream.client, POLLHUP);
    stream.expect_disconnected();
}

void test_peer_does_not_learn_of_an_end_of_reads() {
    Stream stream;
    CHECK(rshutdown(stream.client, SHUT_RD) == 0);
    CHECK(wait_for_events(stream.client, POLLIN) == POLLIN);
    expect_end_of_data(stream.client);
    CHECK(rsend(stream.client, "x", 1, 0) == 1);
    stream.command_peer(receive_byte);
    CHECK(stream.query_peer_events() == POLLOUT);
    CHECK(rshutdown(stream.client, SHUT_WR) == 0);
    stream.expect_peer_events(POLLIN | POLLOUT | POLLHUP);
    stream.expect_disconnected();
}

// rpoll reports POLLHUP even if the program has not read the data yet, but only after a delay of 300 ms, because
// `rstream -T a` (a test program of librdmacm) stops at POLLHUP, and should have read the data before.
void test_hangup_comes_together_with_data(char ending_command) {
    Stream stream;
    stream.command_peer(send_data);
    const auto begin = std::chrono::steady_clock::now();
    stream.command_peer(ending_command);
    expect_hangup_or_error(stream.client, POLLHUP);
    CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(300));
    CHECK(query_events_now(stream.client) == (POLLIN | POLLOUT | POLLHUP));
    expect_data(stream.client);
    stream.expect_disconnected();
}

void test_killed_peer_hangs_up() {
    Stream stream;
    stream.command_peer(send_data);
    // rsend returns when the data is posted, so a kill before the arrival of the data would lose it.
    wait_for_data(stream.client);
    std::thread kill_thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        stream.kill_peer();
    });
    expect_hangup_or_error(stream.client, POLLHUP);
    kill_thread.join();
    expect_data(stream.client);
    stream.expect_disconnected();
}

void test_killed_peer_ends_calls_that_wait() {
    Stream receiving_stream, sending_stream;
    std::thread receive_thread([&] { expect_end_of_data(receiving_stream.client); });
    std::thread send_thread([&] {
        // The peer reads nothing, so rsend waits when the buffers of the peer are full.
        const std::vector<char> bytes(1 << 20);
        while (rsend(sending_stream.client, bytes.data(), bytes.size(), 0) > 0) {
        }
        CHECK(errno == ECONNRESET);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    receiving_stream.kill_peer();
    sending_stream.kill_peer();
    receive_thread.join();
    send_thread.join();
    CHECK((query_events_now(receiving_stream.client) & (POLLHUP | POLLERR)) == POLLHUP);
    // The twin reports either the end of the connection or the failed transfer, depending on which comes first.
    CHECK((query_events_now(sending_stream.client) & (POLLHUP | POLLERR)) != 0);
}

void test_failed_transfer_is_an_error_event() {
    using ReplacePlan = int (*)(const char*);
    Stream stream;
    const auto replace_plan =
        reinterpret_cast<ReplacePlan>(dlsym(dlopen("libibverbs.so.1", RTLD_NOLOAD | RTLD_NOW), "gdrkit_twin_faults"));
    // 12 is IBV_WC_RETRY_EXC_ERR, as if the host of the peer had lost its power.
    CHECK(replace_plan("gdrkit-faults 1\nwc.send call=1 status=12\n") == 0);
    CHECK(rsend(stream.client, "x", 1, 0) == 1);
    expect_hangup_or_error(stream.client, POLLERR);
    CHECK(replace_plan("gdrkit-faults 1\n") == 0);
    CHECK((query_events_now(stream.client) & ~POLLOUT) == (POLLIN | POLLERR));
    expect_end_of_data(stream.client);
    CHECK_FAILS(rsend(stream.client, "x", 1, 0), ECONNRESET);
    CHECK(take_socket_error(stream.client) == EIO && take_socket_error(stream.client) == 0);
    CHECK((query_events_now(stream.client) & (POLLERR | POLLHUP)) == POLLERR);
}

void test_own_shutdown_wakes_a_thread_that_waits() {
    Stream stream;
    std::thread wait_thread([&] { CHECK((wait_for_events(stream.client, POLLIN) & POLLIN) != 0); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(rshutdown(stream.client, SHUT_RDWR) == 0);
    wait_thread.join();
    stream.expect_peer_events(POLLIN | POLLOUT | POLLHUP);
    stream.expect_disconnected();
}

void test_rselect_reports_a_hangup_as_readable_and_exception() {
    Stream stream;
    const auto select_all = [&](fd_set fd_sets[3], int timeout_s) {
        for (int index = 0; index < 3; ++index) {
            FD_ZERO(&fd_sets[index]);
            FD_SET(stream.client, &fd_sets[index]);
        }
        timeval timeout{timeout_s, 0};
        return rselect(stream.client + 1, &fd_sets[0], &fd_sets[1], &fd_sets[2], &timeout);
    };
    fd_set fd_sets[3]; // readable, writable and exceptions
    CHECK(select_all(fd_sets, 0) == 1 && FD_ISSET(stream.client, &fd_sets[1]));
    CHECK(!FD_ISSET(stream.client, &fd_sets[0]) && !FD_ISSET(stream.client, &fd_sets[2]));
    stream.command_peer(shut_both);
    expect_hangup_or_error(stream.client, POLLHUP);
    CHECK(select_all(fd_sets, 30) == 3 && FD_ISSET(stream.client, &fd_sets[0]) && FD_ISSET(stream.client, &fd_sets[2]));
}

// Check the state of an rsocket after its connection was refused, and close it.
void check_refused_and_close(int socket, sockaddr* address) {
    expect_exact_events(socket, POLLIN | POLLOUT | POLLERR);
    CHECK(take_socket_error(socket) == ECONNREFUSED && take_socket_error(socket) == 0);
    CHECK(query_events_now(socket) == (POLLIN | POLLOUT | POLLERR));
    CHECK_FAILS(rconnect(socket, address, sizeof(sockaddr_in)), ENOTCONN);
    CHECK_FAILS(rsend(socket, "x", 1, 0), ECONNRESET);
    expect_end_of_data(socket);
    CHECK(rclose(socket) == 0);
}

void test_refused_connection_is_an_error_event() {
    IpEndpoint address("127.0.0.1", 7171);
    const int blocking_socket = rsocket(AF_INET, SOCK_STREAM, 0), nonblocking_socket = rsocket(AF_INET, SOCK_STREAM, 0);
    CHECK_FAILS(rsend(blocking_socket, "x", 1, 0), ENOTCONN);
    CHECK(query_events_now(blocking_socket) == 0 && rshutdown(blocking_socket, SHUT_RDWR) == 0);
    CHECK_FAILS(rconnect(blocking_socket, address, sizeof(sockaddr_in)), ECONNREFUSED);
    check_refused_and_close(blocking_socket, address);
    CHECK(rfcntl(nonblocking_socket, F_SETFL, O_NONBLOCK) == 0);
    CHECK_FAILS(rconnect(nonblocking_socket, address, sizeof(sockaddr_in)), EINPROGRESS);
    expect_hangup_or_error(nonblocking_socket, POLLERR);
    check_refused_and_close(nonblocking_socket, address);
    CHECK_FAILS(rclose(nonblocking_socket), EBADF);
    CHECK_FAILS(rsocket(AF_UNIX, SOCK_STREAM, 0), ENOTSUP);
}

void test_listener_killed_before_its_answer_refuses() {
    Stream stream(false);
    CHECK(rfcntl(stream.client, F_SETFL, O_NONBLOCK) == 0);
    CHECK_FAILS(stream.connect(), EINPROGRESS);
    CHECK_FAILS(stream.connect(), EINPROGRESS);
    CHECK(query_events_now(stream.client) == 0);
    CHECK_FAILS(rsend(stream.client, "x", 1, 0), EAGAIN);
    stream.kill_peer();
    CHECK(wait_for_events(stream.client, POLLOUT) == (POLLOUT | POLLERR));
    CHECK(take_socket_error(stream.client) == ECONNREFUSED);
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count == 2) {
        return run_peer(std::atoi(arguments[1]));
    }
    test_end_of_the_peers_writes_is_not_a_hangup();
    test_ends_of_both_directions_at_once_lose_no_data();
    test_own_end_of_writes_lets_the_peer_send();
    test_peer_does_not_learn_of_an_end_of_reads();
    test_hangup_comes_together_with_data(shut_both);
    test_hangup_comes_together_with_data(close_socket);
    test_killed_peer_hangs_up();
    test_killed_peer_ends_calls_that_wait();
    test_failed_transfer_is_an_error_event();
    test_own_shutdown_wakes_a_thread_that_waits();
    test_rselect_reports_a_hangup_as_readable_and_exception();
    test_refused_connection_is_an_error_event();
    test_listener_killed_before_its_answer_refuses();
    return 0;
}
