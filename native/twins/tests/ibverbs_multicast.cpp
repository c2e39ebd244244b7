// Tests of the software twin of libibverbs: multicast groups, datagrams between processes, and hostile frames.
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cerrno>
#include <memory>

#include "ibverbs/datagram_frame.hpp"
#include "model/sockets.hpp"
#include "tests/ibverbs_datagram_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;
using gdrkit::twin::verbs::DatagramHeader;
using gdrkit::twin::verbs::make_datagram_socket_name;
using gdrkit::twin::verbs::make_multicast_socket_name;

namespace {

// Size of a receive buffer. A network header and a datagram of the path MTU need 4136 bytes.
constexpr std::size_t receive_bytes = 4200;

// The second process runs this function. It joins a group, and sends the bytes of each datagram back to the sender. It
// ends after an empty datagram.
int run_echo(int socket) {
    DatagramEndpoint endpoint(1);
    const ibv_gid group = make_group(1);
    CHECK(ibv_attach_mcast(endpoint.qp, &group, 0) == 0);
    for (int index = 0; index < 8; ++index) {
        CHECK(endpoint.post_receive(static_cast<std::uint64_t>(index), static_cast<std::size_t>(index) * receive_bytes,
                                    receive_bytes) == 0);
    }
    CHECK(send_all(socket, &endpoint.qp->qp_num, sizeof endpoint.qp->qp_num));
    ibv_gid peer_gid{};
    CHECK(recv_all(socket, &peer_gid, sizeof peer_gid));
    ibv_ah* const return_ah = endpoint.create_address_handle(make_path(peer_gid));
    // An answer may arrive, and the peer may send its next datagram, before the answer completes here. So a buffer is
    // posted again only after the answer from it has completed.
    bool has_ended = false;
    for (int pending_answer_count = 0; !has_ended || pending_answer_count > 0;) {
        const ibv_wc wc = endpoint.poll_completion();
        CHECK(wc.status == IBV_WC_SUCCESS);
        const std::size_t offset = wc.wr_id * receive_bytes;
        if (wc.opcode == IBV_WC_SEND) {
            --pending_answer_count;
            CHECK(endpoint.post_receive(wc.wr_id, offset, receive_bytes) == 0);
        } else if (wc.byte_len == grh_bytes) {
            has_ended = true;
        } else {
            CHECK(endpoint.send(wc.wr_id, return_ah, wc.src_qp, offset + grh_bytes, wc.byte_len - grh_bytes) == 0);
            ++pending_answer_count;
        }
    }
    CHECK(ibv_destroy_ah(return_ah) == 0 && ibv_detach_mcast(endpoint.qp, &group, 0) == 0);
    return 0;
}

struct EchoProcess {
    pid_t pid = 0;
    Fd socket;
    std::uint32_t qp_num = 0;

    explicit EchoProcess(const ibv_gid& gid) {
        int sockets[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
        socket = Fd(sockets[0]);
        const Fd child_socket(sockets[1]);
        std::string program = "/proc/self/exe", socket_text = std::to_string(child_socket.get());
        char* arguments[] = {program.data(), socket_text.data(), nullptr};
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addclose(&actions, sockets[0]);
        CHECK(posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, arguments, environ) == 0);
        posix_spawn_file_actions_destroy(&actions);
        CHECK(recv_all(socket.get(), &qp_num, sizeof qp_num) && send_all(socket.get(), &gid, sizeof gid));
    }
    void expect_exit() const {
        int status = 0;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
};

void test_datagrams_move_between_processes() {
    DatagramEndpoint endpoint(0);
    const EchoProcess echo(query_gid(endpoint.context));
    ibv_ah* const ah =
        endpoint.create_address_handle(make_path(query_gid(std::make_unique<DatagramEndpoint>(1)->context)));
    for (std::size_t count = 0; count < 50; ++count) {
        const std::size_t length = 1 + count * 83;
        fill_pattern(endpoint.buffer->bytes, length, count);
        CHECK(endpoint.post_receive(1, 8192, receive_bytes) == 0);
        CHECK(endpoint.send(2, ah, echo.qp_num, 0, std::min(length, mtu_bytes), 0) == 0);
        const ibv_wc wc = endpoint.expect_completion(1);
        CHECK(wc.src_qp == echo.qp_num && wc.byte_len == grh_bytes + length);
        CHECK(has_pattern(endpoint.buffer->bytes + 8192 + grh_bytes, length, count));
        CHECK(endpoint.send(3, ah, echo.qp_num ^ 1, 0, 0) == 0); // frees the slot of the unsignaled request
        endpoint.expect_completion(3);
    }
    CHECK(endpoint.send(4, ah, echo.qp_num, 0, 0) == 0);
    echo.expect_exit();
    endpoint.expect_completion(4);
    CHECK(ibv_destroy_ah(ah) == 0);
}

// A stopped receiver delays only datagrams to itself. Datagrams to a killed receiver are lost at once, like datagrams
// to an unknown queue pair.
void test_stopped_receiver_does_not_block_others() {
    DatagramEndpoint endpoint(0, test_qkey, 256), local_endpoint(0);
    const EchoProcess echo(query_gid(endpoint.context));
    CHECK(kill(echo.pid, SIGSTOP) == 0);
    ibv_ah* const ah =
        endpoint.create_address_handle(make_path(query_gid(std::make_unique<DatagramEndpoint>(1)->context)));
    ibv_ah* const local_ah = endpoint.create_address_handle(make_path(query_gid(endpoint.context)));
    for (std::uint64_t count = 0; count < 200; ++count) {
        CHECK(endpoint.send(count, ah, echo.qp_num, 0, mtu_bytes) == 0);
    }
    CHECK(local_endpoint.post_receive(1, 0, 100) == 0);
    CHECK(endpoint.send(200, local_ah, local_endpoint.qp->qp_num, 0, 8) == 0);
    local_endpoint.expect_completion(1);
    for (std::uint64_t count = 0; count <= 200; ++count) {
        endpoint.expect_completion(count);
    }
    CHECK(kill(echo.pid, SIGKILL) == 0);
    int status = 0;
    CHECK(waitpid(echo.pid, &status, 0) == echo.pid);
    CHECK(endpoint.send(201, ah, echo.qp_num, 0, 8) == 0);
    endpoint.expect_completion(201);
    CHECK(ibv_destroy_ah(ah) == 0 && ibv_destroy_ah(local_ah) == 0);
}

void test_multicast_reaches_every_member() {
    DatagramEndpoint sender(0), member(1), outsider(0);
    const ibv_gid group = make_group(1), other_group = make_group(2);
    const EchoProcess echo(query_gid(sender.context));
    // Attaching twice has no further effect: one copy arrives.
    for (int count = 0; count < 2; ++count) {
        CHECK(ibv_attach_mcast(sender.qp, &group, 0) == 0 && ibv_attach_mcast(member.qp, &group, 0) == 0);
    }
    CHECK(ibv_attach_mcast(outsider.qp, &other_group, 0) == 0);
    for (const DatagramEndpoint* endpoint : {&sender, &member, &outsider}) {
        CHECK(endpoint->post_receive(1, 0, 200) == 0 && endpoint->post_receive(2, 4096, 200) == 0);
    }
    ibv_ah* const ah = sender.create_address_handle(make_path(group));
    fill_pattern(sender.buffer->bytes + 8192, 100);
    CHECK(sender.send(3, ah, multicast_qpn, 8192, 100, 0) == 0);
    CHECK(member.expect_completion(1).src_qp == sender.qp->qp_num);
    CHECK(has_pattern(member.buffer->bytes + grh_bytes, 100));
    CHECK(std::memcmp(member.buffer->bytes + 24, &group, sizeof group) == 0); // the destination in the network header
    // The sender gets its own datagram, and the answer of the member in the other process.
    CHECK(sender.expect_completion(1).src_qp + sender.expect_completion(2).src_qp == sender.qp->qp_num + echo.qp_num);
    outsider.expect_no_completion();
    member.expect_no_completion();
    CHECK(ibv_destroy_qp(member.qp) == EBUSY);
    CHECK(ibv_detach_mcast(sender.qp, &group, 0) == 0 && ibv_detach_mcast(member.qp, &group, 0) == 0);
    CHECK(ibv_detach_mcast(member.qp, &group, 0) == EINVAL && ibv_detach_mcast(outsider.qp, &other_group, 0) == 0);
    CHECK(sender.send(4, ah, multicast_qpn, 8192, 0) == 0); // the process in the group ends after an empty datagram
    sender.expect_completion(4);
    echo.expect_exit();
    member.expect_no_completion();
    CHECK(ibv_destroy_ah(ah) == 0);
}

void test_wrong_groups_are_refused() {
    DatagramEndpoint endpoint;
    Endpoint connected(0);
    const ibv_gid unicast = query_gid(endpoint.context);
    ibv_gid group = make_group(3), ipv4_group{}, ipv4_host{};
    CHECK(ibv_attach_mcast(endpoint.qp, &unicast, 0) == EINVAL && ibv_attach_mcast(connected.qp, &group, 0) == EINVAL);
    ipv4_group.raw[10] = ipv4_group.raw[11] = ipv4_host.raw[10] = ipv4_host.raw[11] = 0xff;
    ipv4_group.raw[12] = 239;
    ipv4_host.raw[12] = 10;
    CHECK(ibv_attach_mcast(endpoint.qp, &ipv4_host, 0) == EINVAL);
    CHECK(ibv_attach_mcast(endpoint.qp, &ipv4_group, 0) == 0 && ibv_detach_mcast(endpoint.qp, &ipv4_group, 0) == 0);
    // The test takes the socket names of all members, so that the group is full.
    ibv_device_attr limits{};
    CHECK(ibv_query_device(endpoint.context, &limits) == 0 && limits.max_mcast_qp_attach == 56);
    std::vector<Fd> members;
    for (unsigned member = 0; member < 56; ++member) {
        members.emplace_back(open_datagram_receiver(make_multicast_socket_name(group, member)));
        CHECK(members.back());
    }
    CHECK(ibv_attach_mcast(endpoint.qp, &group, 0) == ENOMEM);
    members.pop_back();
    CHECK(ibv_attach_mcast(endpoint.qp, &group, 0) == 0 && ibv_detach_mcast(endpoint.qp, &group, 0) == 0);
}

// Frames that no twin sends are discarded: wrong magic, sizes, destination or flags, and frames with descriptors.
void test_hostile_frames_are_discarded() {
    DatagramEndpoint endpoint;
    const ibv_gid gid = query_gid(endpoint.context);
    const std::string socket_name = make_datagram_socket_name(gid, endpoint.qp->qp_num);
    const Fd sender(open_datagram_sender());
    DatagramHeader valid_header{};
    valid_header.magic = verbs::datagram_magic;
    valid_header.version = verbs::datagram_version;
    valid_header.source_gid = valid_header.destination_gid = gid;
    valid_header.source_qpn = 7;
    valid_header.destination_qpn = endpoint.qp->qp_num;
    valid_header.qkey = test_qkey;
    valid_header.payload_bytes = 8;
    std::vector<char> payload(65536);
    const auto send = [&](const DatagramHeader& header, std::size_t header_bytes, std::size_t payload_bytes) {
        const iovec parts[] = {{const_cast<DatagramHeader*>(&header), header_bytes}, {payload.data(), payload_bytes}};
        int error = EAGAIN;
        while (error == EAGAIN) {
            error = send_datagram(sender.get(), socket_name, parts);
        }
        CHECK(error == 0);
    };
    CHECK(endpoint.post_receive(1, 0, 200) == 0);
    for (std::size_t bytes = 0; bytes < sizeof valid_header; bytes += 7) {
        send(valid_header, bytes, 0);
    }
    send(valid_header, sizeof valid_header, 7);
    send(valid_header, sizeof valid_header, 9);
    send(valid_header, sizeof valid_header, 65000);
    const auto send_changed = [&](auto change) {
        DatagramHeader header = valid_header;
        change(&header);
        send(header, sizeof header, std::min<std::size_t>(header.payload_bytes, 65000));
    };
    send_changed([](DatagramHeader* header) { header->magic ^= 1; });
    send_changed([](DatagramHeader* header) { ++header->version; });
    send_changed([](DatagramHeader* header) { header->payload_bytes = 4097; });
    send_changed([](DatagramHeader* header) { header->payload_bytes = 0xffffffff; });
    send_changed([](DatagramHeader* header) { ++header->destination_qpn; });
    send_changed([](DatagramHeader* header) { header->destination_gid.raw[15] ^= 1; });
    send_changed([](DatagramHeader* header) { header->destination_gid = make_group(1); });
    send_changed([](DatagramHeader* header) { header->source_qpn = 0x1000000; });
    send_changed([](DatagramHeader* header) { header->flags = 4; });
    send_changed([](DatagramHeader* header) { header->service_level = 16; });
    send_changed([](DatagramHeader* header) { header->flow_label = 0x100000; });
    send_changed([](DatagramHeader* header) { header->is_roce_v2 = 2; });
    endpoint.expect_no_completion();
    send(valid_header, sizeof valid_header, 8);
    CHECK(endpoint.expect_completion(1).src_qp == 7);
}

// A queue pair is destroyed right after a send to its own group. Its thread wakes for the datagram while this thread
// still sends to other members. The thread must notice that the queue pair is destroyed.
void test_pair_ends_right_after_a_send_to_its_group() {
    for (int round = 0; round < 100; ++round) {
        const DatagramEndpoint member(0);
        const ibv_gid group = make_group(7);
        CHECK(ibv_attach_mcast(member.qp, &group, 0) == 0);
        ibv_ah* const ah = member.create_address_handle(make_path(group));
        usleep(2000); // until the thread sleeps, so that this thread sends
        for (int count = 0; count < 16; ++count) {
            CHECK(member.send(1, ah, multicast_qpn, 0, 64, 0) == 0);
        }
        CHECK(ibv_detach_mcast(member.qp, &group, 0) == 0 && ibv_destroy_ah(ah) == 0);
    }
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 1) {
        return run_echo(std::atoi(arguments[1]));
    }
    test_datagrams_move_between_processes();
    test_stopped_receiver_does_not_block_others();
    test_multicast_reaches_every_member();
    test_wrong_groups_are_refused();
    test_hostile_frames_are_discarded();
    test_pair_ends_right_after_a_send_to_its_group();
    return 0;
}
