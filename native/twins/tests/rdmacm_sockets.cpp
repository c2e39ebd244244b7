// Tests of the software twin of librdmacm: rsockets, which are sockets over RDMA, with streams and all their calls,
// direct placement, and datagrams.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <thread>

#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t large_bytes = 5'000'003; // more than the buffers of both sides

// Two connected stream rsockets of this process.
struct Streams {
    int listener = rsocket(AF_INET, SOCK_STREAM, 0);
    int client = rsocket(AF_INET, SOCK_STREAM, 0);
    int server = -1;
    explicit Streams(int io_mapping_count = 0) {
        CHECK(listener >= 0 && client >= 0);
        for (const int socket : {listener, client}) {
            // 0x10000 is the level SOL_RDMA, and 3 is the option RDMA_IOMAPSIZE of rsocket.h: how many mapped
            // buffers of the peer the rsocket can store.
            CHECK(rsetsockopt(socket, 0x10000, 3, &io_mapping_count, sizeof io_mapping_count) == 0);
        }
        IpEndpoint address("127.0.0.1");
        CHECK(rbind(listener, address, sizeof(sockaddr_in)) == 0 && rlisten(listener, 4) == 0);
        socklen_t length = sizeof address.storage;
        CHECK(rgetsockname(listener, address, &length) == 0 && length == sizeof(sockaddr_in));
        std::thread accept_thread([this] { server = raccept(listener, nullptr, nullptr); });
        CHECK(rconnect(client, address, length) == 0);
        accept_thread.join();
        CHECK(server >= 0);
    }
    ~Streams() {
        for (const int socket : {client, server, listener}) {
            CHECK(socket < 0 || rclose(socket) == 0);
        }
    }
    Streams(const Streams&) = delete;
    Streams& operator=(const Streams&) = delete;
};

void send_pattern(int socket, std::size_t size_bytes) {
    std::vector<std::uint8_t> bytes(size_bytes);
    fill_pattern(bytes.data(), size_bytes);
    CHECK(rsend(socket, bytes.data(), size_bytes, 0) == static_cast<ssize_t>(size_bytes));
}

void expect_pattern(int socket, std::size_t size_bytes) {
    std::vector<std::uint8_t> bytes(size_bytes);
    CHECK(rrecv(socket, bytes.data(), size_bytes, MSG_WAITALL) == static_cast<ssize_t>(size_bytes));
    CHECK(has_pattern(bytes.data(), size_bytes));
}

void test_bytes_arrive_in_both_directions_at_once() {
    Streams streams;
    std::thread client_sender([&] { send_pattern(streams.client, large_bytes); });
    std::thread server_sender([&] { send_pattern(streams.server, large_bytes); });
    std::thread client_receiver([&] { expect_pattern(streams.client, large_bytes); });
    expect_pattern(streams.server, large_bytes);
    for (std::thread* thread : {&client_sender, &server_sender, &client_receiver}) {
        thread->join();
    }
}

void test_bytes_move_over_the_queue_pairs_of_the_twin() {
    using ReadLedger = int (*)(char*, std::size_t);
    Streams streams;
    std::thread sender([&] { send_pattern(streams.client, large_bytes); });
    expect_pattern(streams.server, large_bytes);
    sender.join();
    // The ledger of the verbs twin counts the bytes that its queue pairs sent.
    const auto read_ledger =
        reinterpret_cast<ReadLedger>(dlsym(dlopen("libibverbs.so.1", RTLD_NOLOAD | RTLD_NOW), "gdrkit_twin_ledger"));
    std::string ledger_json(65536, '\0');
    read_ledger(ledger_json.data(), ledger_json.size());
    constexpr std::string_view key = "\"send_bytes\":";
    const std::size_t key_position = ledger_json.find(key);
    CHECK(key_position != std::string::npos &&
          std::strtoull(ledger_json.c_str() + key_position + key.size(), nullptr, 10) >= large_bytes);
}

void test_end_of_data_is_seen_after_the_data() {
    Streams streams;
    send_pattern(streams.client, 1000);
    CHECK(rshutdown(streams.client, SHUT_WR) == 0);
    CHECK_FAILS(rsend(streams.client, "x", 1, 0), ECONNRESET);
    char byte = 0;
    CHECK(rrecv(streams.server, &byte, 1, MSG_PEEK) == 1);
    expect_pattern(streams.server, 1000);
    CHECK(rrecv(streams.server, &byte, 1, 0) == 0);
    CHECK(rsend(streams.server, "y", 1, 0) == 1 && rread(streams.client, &byte, 1) == 1 && byte == 'y');
}

void test_parts_and_short_reads() {
    Streams streams;
    char first[] = "abc", second[] = "defgh";
    const iovec parts[] = {{first, 3}, {second, 5}};
    CHECK(rwritev(streams.client, parts, 2) == 8);
    char head[2], tail[16];
    const iovec targets[] = {{head, 2}, {tail, 16}};
    ssize_t read_bytes = 0;
    CHECK(rrecv(streams.server, tail, 8, MSG_PEEK | MSG_WAITALL) > 0);
    CHECK((read_bytes = rreadv(streams.server, targets, 2)) == 8);
    CHECK(std::memcmp(head, "ab", 2) == 0 && std::memcmp(tail, "cdefgh", 6) == 0);
}

void test_nonblocking_calls_do_not_wait() {
    Streams streams;
    CHECK(rfcntl(streams.server, F_SETFL, O_NONBLOCK) == 0);
    CHECK((rfcntl(streams.server, F_GETFL) & O_NONBLOCK) != 0);
    char byte = 0;
    CHECK_FAILS(rrecv(streams.server, &byte, 1, 0), EAGAIN);
    CHECK_FAILS(rrecv(streams.client, &byte, 1, MSG_DONTWAIT), EAGAIN);
    // The peer reads nothing, so the buffers become full.
    std::vector<char> bytes(65536);
    std::size_t sent_bytes = 0;
    ssize_t accepted_bytes = 0;
    pollfd poll_entry{streams.server, POLLOUT, 0};
    do {
        CHECK(sent_bytes < (64U << 20));
        accepted_bytes = rsend(streams.server, bytes.data(), bytes.size(), 0);
        sent_bytes += accepted_bytes > 0 ? static_cast<std::size_t>(accepted_bytes) : 0;
    } while (accepted_bytes > 0 || rpoll(&poll_entry, 1, 300) == 1);
    CHECK(errno == EAGAIN);
    for (std::size_t received_bytes = 0; received_bytes < sent_bytes;) {
        const ssize_t part_bytes = rrecv(streams.client, bytes.data(), bytes.size(), 0);
        CHECK(part_bytes > 0);
        received_bytes += static_cast<std::size_t>(part_bytes);
    }
    CHECK(rpoll(&poll_entry, 1, 10'000) == 1 && poll_entry.revents == POLLOUT);
}

void test_poll_waits_for_rsockets_and_other_descriptors() {
    Streams streams;
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0);
    pollfd poll_entries[] = {{streams.server, POLLIN, 0}, {pipe_ends[0], POLLIN, 0}};
    CHECK(rpoll(poll_entries, 2, 20) == 0);
    CHECK(write(pipe_ends[1], "x", 1) == 1);
    CHECK(rpoll(poll_entries, 2, 10'000) == 1 && poll_entries[1].revents == POLLIN);
    CHECK(rsend(streams.client, "x", 1, 0) == 1);
    fd_set readable;
    FD_ZERO(&readable);
    FD_SET(streams.server, &readable);
    timeval timeout{10, 0};
    CHECK(rselect(streams.server + 1, &readable, nullptr, nullptr, &timeout) == 1 &&
          FD_ISSET(streams.server, &readable));
    close(pipe_ends[0]);
    close(pipe_ends[1]);
}

void test_mapped_buffer_gets_writes_before_later_data() {
    Streams streams(1);
    std::vector<std::uint8_t> target(100'000), source(50'000);
    fill_pattern(source.data(), source.size());
    // The client can store one mapped buffer of the server. The server does not announce a buffer without PROT_WRITE to
    // the client. So such a buffer does not count, and its riounmap does not remove the other mapping at the same
    // offset. A second buffer with PROT_WRITE is refused.
    std::vector<std::uint8_t> unannounced_buffer(100);
    CHECK(riomap(streams.server, unannounced_buffer.data(), unannounced_buffer.size(), PROT_NONE, 0, 4096) == 4096);
    CHECK(riomap(streams.server, target.data(), target.size(), PROT_WRITE, 0, 4096) == 4096);
    CHECK(riomap(streams.server, source.data(), source.size(), PROT_WRITE, 0, -1) == -1 && errno == ENOMEM);
    CHECK(riounmap(streams.server, unannounced_buffer.data(), unannounced_buffer.size()) == 0);
    // The client knows the mapping as soon as it has received data that the server sent later.
    send_pattern(streams.server, 1);
    expect_pattern(streams.client, 1);
    CHECK(riowrite(streams.client, source.data(), source.size(), 4096 + 1000, 0) == source.size());
    // The mapping begins at the offset 4096.
    CHECK(riowrite(streams.client, source.data(), 1, 4095, 0) == static_cast<std::size_t>(-1));
    send_pattern(streams.client, 1);
    expect_pattern(streams.server, 1);
    CHECK(has_pattern(target.data() + 1000, source.size()) && target[999] == 0);
    CHECK(riounmap(streams.server, target.data(), target.size()) == 0);
}

void test_datagrams_have_their_sender() {
    const int receiver = rsocket(AF_INET, SOCK_DGRAM, 0), sender = rsocket(AF_INET, SOCK_DGRAM, 0);
    IpEndpoint receiver_address("127.0.0.1", 7272), sender_address("127.0.0.1", 7273);
    CHECK(rbind(receiver, receiver_address, sizeof(sockaddr_in)) == 0 &&
          rbind(sender, sender_address, sizeof(sockaddr_in)) == 0);
    char bytes[16] = {};
    CHECK_FAILS(rrecv(receiver, bytes, sizeof bytes, MSG_DONTWAIT), EAGAIN);
    CHECK(rsendto(sender, "hello", 5, 0, receiver_address, sizeof(sockaddr_in)) == 5);
    CHECK(rsendto(sender, "again", 6, 0, receiver_address, sizeof(sockaddr_in)) == 6);
    sockaddr_storage reported_address{};
    socklen_t length = sizeof reported_address;
    CHECK(rrecvfrom(receiver, bytes, sizeof bytes, 0, reinterpret_cast<sockaddr*>(&reported_address), &length) == 5);
    CHECK(std::memcmp(bytes, "hello", 5) == 0 && length == sizeof(sockaddr_in));
    CHECK(std::memcmp(&reported_address, static_cast<sockaddr*>(sender_address), sizeof(sockaddr_in)) == 0);
    CHECK(rrecv(receiver, bytes, 2, 0) == 2); // the rest of a datagram is lost
    CHECK(rconnect(receiver, reinterpret_cast<sockaddr*>(&reported_address), length) == 0);
    CHECK(rsend(receiver, "back", 4, 0) == 4 && rrecv(sender, bytes, sizeof bytes, 0) == 4);
    const std::vector<char> too_long_datagram(5000);
    CHECK_FAILS(rsend(receiver, too_long_datagram.data(), too_long_datagram.size(), 0), EMSGSIZE);
    IpEndpoint unused_address("127.0.0.1", 7274);
    CHECK_FAILS(rsendto(sender, "x", 1, 0, unused_address, sizeof(sockaddr_in)), ECONNREFUSED);
    CHECK(rclose(sender) == 0 && rclose(receiver) == 0);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_bytes_arrive_in_both_directions_at_once();
    test_bytes_move_over_the_queue_pairs_of_the_twin();
    test_end_of_data_is_seen_after_the_data();
    test_parts_and_short_reads();
    test_nonblocking_calls_do_not_wait();
    test_poll_waits_for_rsockets_and_other_descriptors();
    test_mapped_buffer_gets_writes_before_later_data();
    test_datagrams_have_their_sender();
    return 0;
}
