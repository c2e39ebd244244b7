// Tests of the software twin of libibverbs: multicast groups, datagrams between processes, and frames that
// no twin sends.
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstddef>
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

// Size of a receive buffer. The network header (40 bytes) and a payload of the path MTU (4096 bytes) fit into it.
constexpr std::size_t receive_buffer_bytes = 4200;
constexpr unsigned unsignaled = 0; // send flags without IBV_SEND_SIGNALED

// The second process runs this function. It attaches a queue pair of NIC 1 to group 1, sends the number of this queue
// pair to the first process over the socket, and receives the GID of the first process. Then it sends the payload of
// each datagram back to the sender. It ends after an empty datagram.
int run_echo(int parent_socket) {
    DatagramEndpoint endpoint(1);
    const ibv_gid group = make_group(1);
    CHECK(ibv_attach_mcast(endpoint.qp, &group, 0) == 0);
    // The wr_id of a receive request, and of the answer from its buffer, is the index of the buffer.
    for (int index = 0; index < 8; ++index) {
        CHECK(endpoint.post_receive(static_cast<std::uint64_t>(index),
                                    static_cast<std::size_t>(index) * receive_buffer_bytes, receive_buffer_bytes) == 0);
    }
    CHECK(send_all(parent_socket, &endpoint.qp->qp_num, sizeof endpoint.qp->qp_num));
    ibv_gid peer_gid{};
    CHECK(recv_all(parent_socket, &peer_gid, sizeof peer_gid));
    ibv_ah* const return_ah = endpoint.create_address_handle(make_path(peer_gid));
    // The peer can receive an answer and send its next datagram before the send request of the answer completes here.
    // Until then the answer's buffer is in use, so the buffer is posted again only after this completion.
    bool has_received_end = false;
    for (int pending_answer_count = 0; !has_received_end || pending_answer_count > 0;) {
        const ibv_wc wc = endpoint.poll_completion();
        CHECK(wc.status == IBV_WC_SUCCESS);
        const std::size_t offset = wc.wr_id * receive_buffer_bytes;
        if (wc.opcode == IBV_WC_SEND) {
            --pending_answer_count;
            CHECK(endpoint.post_receive(wc.wr_id, offset, receive_buffer_bytes) == 0);
        } else if (wc.byte_len == grh_bytes) {
            has_received_end = true;
        } else {
            CHECK(endpoint.send(wc.wr_id, return_ah, wc.src_qp, offset + grh_bytes, wc.byte_len - grh_bytes) == 0);
            ++pending_answer_count;
        }
    }
    CHECK(ibv_destroy_ah(return_ah) == 0 && ibv_detach_mcast(endpoint.qp, &group, 0) == 0);
    return 0;
}

// A process that runs run_echo(), and the number of its queue pair. It sends the answers to `return_gid`.
struct EchoProcess {
    pid_t pid = 0;
    Fd socket;
    std::uint32_t qp_num = 0;

    explicit EchoProcess(const ibv_gid& return_gid) {
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
        CHECK(recv_all(socket.get(), &qp_num, sizeof qp_num) && send_all(socket.get(), &return_gid, sizeof return_gid));
    }
    void expect_exit() const {
        int status = 0;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
};

void test_datagrams_move_between_processes() {
    DatagramEndpoint endpoint(0);
    const EchoProcess echo(query_gid(endpoint.context));
    // A temporary endpoint gives the GID of NIC 1, which the echo process uses.
    ibv_ah* const echo_ah =
        endpoint.create_address_handle(make_path(query_gid(std::make_unique<DatagramEndpoint>(1)->context)));
    constexpr std::size_t answer_offset = 8192;
    for (std::size_t round = 0; round < 50; ++round) {
        const std::size_t length = 1 + round * 83;
        fill_pattern(endpoint.buffer->bytes, length, round);
        CHECK(endpoint.post_receive(1, answer_offset, receive_buffer_bytes) == 0);
        CHECK(endpoint.send(2, echo_ah, echo.qp_num, 0, std::min(length, mtu_bytes), unsignaled) == 0);
        const ibv_wc wc = endpoint.expect_completion(1);
        CHECK(wc.src_qp == echo.qp_num && wc.byte_len == grh_bytes + length);
        CHECK(has_pattern(endpoint.buffer->bytes + answer_offset + grh_bytes, length, round));
        // The completion of a signaled request also frees the slot of the unsignaled request. The request goes to an
        // unknown queue pair, so that the echo process does not answer.
        CHECK(endpoint.send(3, echo_ah, echo.qp_num ^ 1, 0, 0) == 0);
        endpoint.expect_completion(3);
    }
    CHECK(endpoint.send(4, echo_ah, echo.qp_num, 0, 0) == 0);
    echo.expect_exit();
    endpoint.expect_completion(4);
    CHECK(ibv_destroy_ah(echo_ah) == 0);
}

// When the queue of a stopped receiver has been full for a second, the twin drops the datagrams to this receiver and
// goes on with the datagrams to others. Datagrams to a killed receiver are lost at once, like datagrams to an unknown
// queue pair.
void test_stopped_receiver_does_not_block_others() {
    DatagramEndpoint endpoint(0, test_qkey, 256), local_endpoint(0);
    const EchoProcess echo(query_gid(endpoint.context));
    CHECK(kill(echo.pid, SIGSTOP) == 0);
    // A temporary endpoint gives the GID of NIC 1, which the echo process uses.
    ibv_ah* const echo_ah =
        endpoint.create_address_handle(make_path(query_gid(std::make_unique<DatagramEndpoint>(1)->context)));
    ibv_ah* const local_ah = endpoint.create_address_handle(make_path(query_gid(endpoint.context)));
    for (std::uint64_t wr_id = 0; wr_id < 200; ++wr_id) {
        CHECK(endpoint.send(wr_id, echo_ah, echo.qp_num, 0, mtu_bytes) == 0);
    }
    CHECK(local_endpoint.post_receive(1, 0, 100) == 0);
    CHECK(endpoint.send(200, local_ah, local_endpoint.qp->qp_num, 0, 8) == 0);
    local_endpoint.expect_completion(1);
    for (std::uint64_t wr_id = 0; wr_id <= 200; ++wr_id) {
        endpoint.expect_completion(wr_id);
    }
    CHECK(kill(echo.pid, SIGKILL) == 0);
    int status = 0;
    CHECK(waitpid(echo.pid, &status, 0) == echo.pid);
    CHECK(endpoint.send(201, echo_ah, echo.qp_num, 0, 8) == 0);
    endpoint.expect_completion(201);
    CHECK(ibv_destroy_ah(echo_ah) == 0 && ibv_destroy_ah(local_ah) == 0);
}

void test_multicast_reaches_every_member() {
    DatagramEndpoint sender(0), member(1), outsider(0);
    const ibv_gid group = make_group(1), other_group = make_group(2);
    const EchoProcess echo(query_gid(sender.context));
    // The second attach of a queue pair to the same group has no effect: the queue pair receives each datagram once.
    for (int count = 0; count < 2; ++count) {
        CHECK(ibv_attach_mcast(sender.qp, &group, 0) == 0 && ibv_attach_mcast(member.qp, &group, 0) == 0);
    }
    CHECK(ibv_attach_mcast(outsider.qp, &other_group, 0) == 0);
    for (const DatagramEndpoint* endpoint : {&sender, &member, &outsider}) {
        CHECK(endpoint->post_receive(1, 0, 200) == 0 && endpoint->post_receive(2, 4096, 200) == 0);
    }
    ibv_ah* const ah = sender.create_address_handle(make_path(group));
    fill_pattern(sender.buffer->bytes + 8192, 100);
    CHECK(sender.send(3, ah, multicast_qpn, 8192, 100, unsignaled) == 0);
    CHECK(member.expect_completion(1).src_qp == sender.qp->qp_num);
    CHECK(has_pattern(member.buffer->bytes + grh_bytes, 100));
    CHECK(std::memcmp(member.buffer->bytes + offsetof(ibv_grh, dgid), &group, sizeof group) == 0);
    // The sender gets its own datagram, and the answer of the member in the other process, in any order.
    CHECK(sender.expect_completion(1).src_qp + sender.expect_completion(2).src_qp == sender.qp->qp_num + echo.qp_num);
    outsider.expect_no_completion();
    member.expect_no_completion();
    CHECK(ibv_destroy_qp(member.qp) == EBUSY); // it is attached to a group
    CHECK(ibv_detach_mcast(sender.qp, &group, 0) == 0 && ibv_detach_mcast(member.qp, &group, 0) == 0);
    CHECK(ibv_detach_mcast(member.qp, &group, 0) == EINVAL && ibv_detach_mcast(outsider.qp, &other_group, 0) == 0);
    // The echo process is still in the group. It ends after an empty datagram.
    CHECK(sender.send(4, ah, multicast_qpn, 8192, 0) == 0);
    sender.expect_completion(4);
    echo.expect_exit();
    member.expect_no_completion();
    CHECK(ibv_destroy_ah(ah) == 0);
}

void test_wrong_groups_are_refused() {
    DatagramEndpoint endpoint;
    Endpoint connected_endpoint(0);
    const ibv_gid unicast_gid = query_gid(endpoint.context);
    ibv_gid group = make_group(3), ipv4_group{}, ipv4_host{};
    CHECK(ibv_attach_mcast(endpoint.qp, &unicast_gid, 0) == EINVAL &&
          ibv_attach_mcast(connected_endpoint.qp, &group, 0) == EINVAL);
    // These GIDs are IPv4 addresses (::ffff:a.b.c.d): 239.0.0.0 is a multicast address, 10.0.0.0 is not.
    ipv4_group.raw[10] = ipv4_group.raw[11] = ipv4_host.raw[10] = ipv4_host.raw[11] = 0xff;
    ipv4_group.raw[12] = 239;
    ipv4_host.raw[12] = 10;
    CHECK(ibv_attach_mcast(endpoint.qp, &ipv4_host, 0) == EINVAL);
    CHECK(ibv_attach_mcast(endpoint.qp, &ipv4_group, 0) == 0 && ibv_detach_mcast(endpoint.qp, &ipv4_group, 0) == 0);
    // A group has at most 56 members, and each of them binds one of 56 socket names. The test binds all of these names,
    // so that the group is full.
    ibv_device_attr limits{};
    CHECK(ibv_query_device(endpoint.context, &limits) == 0 && limits.max_mcast_qp_attach == 56);
    std::vector<Fd> member_sockets;
    for (unsigned member_index = 0; member_index < 56; ++member_index) {
        member_sockets.emplace_back(open_datagram_receiver(make_multicast_socket_name(group, member_index)));
        CHECK(member_sockets.back());
    }
    CHECK(ibv_attach_mcast(endpoint.qp, &group, 0) == ENOMEM);
    member_sockets.pop_back();
    CHECK(ibv_attach_mcast(endpoint.qp, &group, 0) == 0 && ibv_detach_mcast(endpoint.qp, &group, 0) == 0);
}

// The receiver discards frames that no twin sends: the frame has a wrong size or destination, or a field of its header
// has an invalid value.
void test_hostile_frames_are_discarded() {
    DatagramEndpoint endpoint;
    const ibv_gid gid = query_gid(endpoint.context);
    const std::string socket_name = make_datagram_socket_name(gid, endpoint.qp->qp_num);
    const Fd sender_socket(open_datagram_sender());
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
        while (error == EAGAIN) { // the queue of the receiver is full
            error = send_datagram(sender_socket.get(), socket_name, parts);
        }
        CHECK(error == 0);
    };
    CHECK(endpoint.post_receive(1, 0, 200) == 0);
    for (std::size_t header_bytes = 0; header_bytes < sizeof valid_header; header_bytes += 7) {
        send(valid_header, header_bytes, 0);
    }
    // The payload is smaller or larger than the 8 bytes of the header's field.
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
    send_changed([](DatagramHeader* header) { header->payload_bytes = 4097; }); // more than the MTU
    send_changed([](DatagramHeader* header) { header->payload_bytes = 0xffffffff; });
    send_changed([](DatagramHeader* header) { ++header->destination_qpn; });
    send_changed([](DatagramHeader* header) { header->destination_gid.raw[15] ^= 1; });
    send_changed([](DatagramHeader* header) { header->destination_gid = make_group(1); });
    send_changed([](DatagramHeader* header) { header->source_qpn = 0x1000000; }); // more than 24 bits
    send_changed([](DatagramHeader* header) { header->flags = 4; });              // an unknown flag
    send_changed([](DatagramHeader* header) { header->service_level = 16; });     // more than 4 bits
    send_changed([](DatagramHeader* header) { header->flow_label = 0x100000; });  // more than 20 bits
    send_changed([](DatagramHeader* header) { header->is_roce_v2 = 2; });         // neither 0 nor 1
    endpoint.expect_no_completion();
    send(valid_header, sizeof valid_header, 8);
    CHECK(endpoint.expect_completion(1).src_qp == 7);
}

// A queue pair is destroyed right after it has sent datagrams to its own group. The thread of the queue pair may wake
// for these datagrams while the test's thread still sends, and must notice the destruction that follows.
void test_pair_ends_right_after_a_send_to_its_group() {
    for (int round = 0; round < 100; ++round) {
        const DatagramEndpoint member(0);
        const ibv_gid group = make_group(7);
        CHECK(ibv_attach_mcast(member.qp, &group, 0) == 0);
        ibv_ah* const ah = member.create_address_handle(make_path(group));
        usleep(2000); // until the queue pair's thread sleeps, so that the calls below send the datagrams themselves
        for (int count = 0; count < 16; ++count) {
            CHECK(member.send(1, ah, multicast_qpn, 0, 64, unsignaled) == 0);
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
