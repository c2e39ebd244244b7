// Tests of the software twin of librdmacm: connections between identifiers of one process, with their events,
// parameters, rejections and disconnection.
#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// Send the pattern, wait for the completions of both sides, and check the received data.
void send_and_check(rdma_cm_id* sender, rdma_cm_id* receiver) {
    Buffer send_buffer(sender->pd, 64), receive_buffer(receiver->pd, 64);
    fill_pattern(send_buffer.bytes, 64);
    ibv_sge receive_sge = receive_buffer.sge(0, 64), send_sge = send_buffer.sge(0, 64);
    ibv_recv_wr receive_wr{7, nullptr, &receive_sge, 1};
    ibv_recv_wr* bad_receive_wr = nullptr;
    CHECK(ibv_post_recv(receiver->qp, &receive_wr, &bad_receive_wr) == 0);
    ibv_send_wr send_wr{};
    send_wr.sg_list = &send_sge;
    send_wr.num_sge = 1;
    send_wr.opcode = IBV_WR_SEND;
    ibv_send_wr* bad_send_wr = nullptr;
    CHECK(ibv_post_send(sender->qp, &send_wr, &bad_send_wr) == 0);
    for (ibv_cq* cq : {sender->send_cq, receiver->recv_cq}) {
        ibv_wc wc{};
        while (ibv_poll_cq(cq, 1, &wc) == 0) {
            std::this_thread::yield();
        }
        CHECK(wc.status == IBV_WC_SUCCESS);
    }
    CHECK(has_pattern(receive_buffer.bytes, 64));
}

void test_data_flows_both_ways_after_connect(const char* address) {
    ConnectionPair pair(address);
    pair.establish();
    CHECK(rdma_get_dst_port(pair.client) == htons(pair.port) && rdma_get_src_port(pair.server) == htons(pair.port));
    CHECK(rdma_get_dst_port(pair.server) == rdma_get_src_port(pair.client));
    send_and_check(pair.client, pair.server);
    send_and_check(pair.server, pair.client);
}

// Like the kernel, the twin returns the whole private data field of an InfiniBand message, padded with zeros. The field
// has 56 bytes in a request, 196 in a reply and 148 in a rejection.
void test_request_has_parameters_and_padded_private_data() {
    ConnectionPair pair;
    rdma_cm_event* const event = pair.send_request("hello");
    CHECK(event->listen_id == pair.listener && event->id->verbs == pair.client->verbs);
    const rdma_conn_param& parameters = event->param.conn;
    CHECK(parameters.private_data_len == 56 && std::memcmp(parameters.private_data, "hello\0", 6) == 0);
    // The client passes responder_resources 2 and initiator_depth 3 (make_parameters()). The event exchanges them,
    // because the server responds to the reads that the client initiates.
    CHECK(parameters.responder_resources == 3 && parameters.initiator_depth == 2);
    CHECK(parameters.retry_count == 5 && parameters.rnr_retry_count == 6);
    CHECK(parameters.qp_num == pair.client->qp->qp_num && parameters.srq == 0);
    CHECK(rdma_ack_cm_event(event) == 0);
    create_queue_pair(pair.server);
    rdma_conn_param reply = make_parameters("reply", 5);
    CHECK(rdma_accept(pair.server, &reply) == 0);
    rdma_cm_event* const established_event = pair.client_channel.take_event(RDMA_CM_EVENT_ESTABLISHED);
    CHECK(established_event->param.conn.private_data_len == 196);
    CHECK(std::memcmp(established_event->param.conn.private_data, "reply\0", 6) == 0);
    CHECK(established_event->param.conn.qp_num == pair.server->qp->qp_num);
    CHECK(rdma_ack_cm_event(established_event) == 0);
    pair.server_channel.expect_event(RDMA_CM_EVENT_ESTABLISHED);
}

void test_too_much_private_data_is_refused() {
    ConnectionPair pair;
    // The private data of a request has at most 56 bytes, and the private data of a rejection at most 148.
    const std::string private_data(57, 'x');
    rdma_conn_param parameters = make_parameters(private_data.data(), private_data.size());
    CHECK_FAILS(rdma_connect(pair.client, &parameters), EINVAL);
    CHECK(rdma_ack_cm_event(pair.send_request(private_data.substr(1))) == 0);
    CHECK_FAILS(rdma_reject(pair.server, std::string(149, 'x').data(), 149), EINVAL);
    CHECK(rdma_reject(pair.server, private_data.data(), 57) == 0);
    pair.client_channel.expect_event(RDMA_CM_EVENT_REJECTED, rejected_by_program_status);
}

void test_rejection_has_reason_and_private_data() {
    ConnectionPair pair;
    CHECK(rdma_ack_cm_event(pair.send_request()) == 0);
    CHECK(rdma_reject(pair.server, "no", 2) == 0);
    rdma_cm_event* const event = pair.client_channel.take_event(RDMA_CM_EVENT_REJECTED);
    CHECK(event->status == rejected_by_program_status && event->param.conn.private_data_len == 148);
    CHECK(std::memcmp(event->param.conn.private_data, "no\0", 3) == 0);
    CHECK(rdma_ack_cm_event(event) == 0);
    CHECK_FAILS(rdma_accept(pair.server, nullptr), EINVAL);
}

void test_port_without_listener_rejects_at_once() {
    // A rejection does not wait for a listener. The test checks only the fastest of several attempts, because a loaded
    // machine may delay the others.
    auto shortest_time = std::chrono::steady_clock::duration::max();
    for (int attempt = 0; attempt < 5; ++attempt) {
        const EventChannel channel;
        rdma_cm_id* const refused_id = create_id(channel);
        resolve_address_and_route(channel, refused_id, "127.0.0.1", 7471);
        create_queue_pair(refused_id);
        const auto start_time = std::chrono::steady_clock::now();
        CHECK(rdma_connect(refused_id, nullptr) == 0);
        channel.expect_event(RDMA_CM_EVENT_REJECTED, no_listener_status);
        shortest_time = std::min(shortest_time, std::chrono::steady_clock::now() - start_time);
        rdma_destroy_qp(refused_id);
        CHECK(rdma_destroy_id(refused_id) == 0);
    }
    CHECK(shortest_time < std::chrono::milliseconds(50));
}

// The server of perftest -R destroys the listener of its first connection, tells its client to connect, and then
// listens again. The request of the client may come too early. Therefore rdma_connect waits a moment for a listener at
// a port where this process found a listener before.
void test_listener_may_return_just_after_the_request() {
    const EventChannel server_channel, client_channel;
    std::uint16_t port = 0;
    for (const bool listens_late : {false, true}) {
        rdma_cm_id* const listener = create_id(server_channel);
        port = listens_late ? port : listen_on_address(listener, "127.0.0.1");
        rdma_cm_id* const client = create_id(client_channel);
        resolve_address_and_route(client_channel, client, "127.0.0.1", port);
        create_queue_pair(client);
        std::thread server_thread([&] {
            if (listens_late) {
                usleep(20'000);
                listen_on_address(listener, "127.0.0.1", port);
            }
            rdma_cm_event* const event = server_channel.take_event(RDMA_CM_EVENT_CONNECT_REQUEST);
            rdma_cm_id* const server_id = event->id;
            CHECK(rdma_ack_cm_event(event) == 0 && rdma_reject(server_id, nullptr, 0) == 0 &&
                  rdma_destroy_id(server_id) == 0);
        });
        CHECK(rdma_connect(client, nullptr) == 0);
        client_channel.expect_event(RDMA_CM_EVENT_REJECTED, rejected_by_program_status);
        server_thread.join();
        rdma_destroy_qp(client);
        CHECK(rdma_destroy_id(client) == 0 && rdma_destroy_id(listener) == 0);
    }
}

// No host has an address of TEST-NET-1 (RFC 5737), so no connection manager answers there.
// rdma_resolve_addr fails on a machine without an IP route to this address; otherwise rdma_connect fails.
void test_unknown_host_is_unreachable() {
    const EventChannel channel;
    rdma_cm_id* const id = create_id(channel);
    CHECK(rdma_resolve_addr(id, nullptr, IpEndpoint("192.0.2.1", 7471), 1000) == 0);
    rdma_cm_event* event = nullptr;
    CHECK(rdma_get_cm_event(channel.channel, &event) == 0);
    const bool has_route = event->event == RDMA_CM_EVENT_ADDR_RESOLVED;
    CHECK(has_route || (event->event == RDMA_CM_EVENT_ADDR_ERROR && event->status < 0));
    CHECK(rdma_ack_cm_event(event) == 0);
    if (has_route) {
        CHECK(rdma_resolve_route(id, 1000) == 0);
        channel.expect_event(RDMA_CM_EVENT_ROUTE_RESOLVED);
        create_queue_pair(id);
        CHECK(rdma_connect(id, nullptr) == 0);
        channel.expect_event(RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
        rdma_destroy_qp(id);
    }
    CHECK(rdma_destroy_id(id) == 0);
}

void test_full_backlog_rejects() {
    const EventChannel server_channel, client_channel;
    rdma_cm_id* const listener = create_id(server_channel);
    const std::uint16_t port = listen_on_address(listener, "127.0.0.1", 0, 1); // any free port, a backlog of 1
    rdma_cm_id* clients[2];
    for (rdma_cm_id*& client : clients) {
        client = create_id(client_channel);
        resolve_address_and_route(client_channel, client, "127.0.0.1", port);
        create_queue_pair(client);
        CHECK(rdma_connect(client, nullptr) == 0);
        CHECK(server_channel.is_readable(30'000));
    }
    // The first request waits in the queue, so the second request finds the backlog full.
    client_channel.expect_event(RDMA_CM_EVENT_REJECTED, rejected_by_program_status);
    // The program has not taken the event of the first request. Destroying the listener rejects this request.
    CHECK(rdma_destroy_id(listener) == 0);
    client_channel.expect_event(RDMA_CM_EVENT_REJECTED, rejected_by_program_status);
    for (rdma_cm_id* client : clients) {
        rdma_destroy_qp(client);
        CHECK(rdma_destroy_id(client) == 0);
    }
}

ibv_qp_state query_qp_state(rdma_cm_id* id) {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init_attr{};
    CHECK(ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init_attr) == 0);
    return attr.qp_state;
}

void test_disconnect_is_seen_by_both_sides() {
    ConnectionPair pair;
    pair.establish();
    CHECK(rdma_disconnect(pair.client) == 0 && query_qp_state(pair.client) == IBV_QPS_ERR);
    pair.server_channel.expect_event(RDMA_CM_EVENT_DISCONNECTED);
    // The side that called rdma_disconnect gets the event only when the other side has disconnected, too.
    CHECK(!pair.client_channel.is_readable(50) && query_qp_state(pair.server) == IBV_QPS_RTS);
    CHECK(rdma_disconnect(pair.server) == 0);
    pair.client_channel.expect_event(RDMA_CM_EVENT_DISCONNECTED);
    pair.client_channel.expect_event(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    pair.server_channel.expect_event(RDMA_CM_EVENT_TIMEWAIT_EXIT);
}

void test_destroyed_identifier_disconnects_its_peer() {
    ConnectionPair pair;
    pair.establish();
    rdma_destroy_qp(pair.client);
    CHECK(rdma_destroy_id(pair.client) == 0);
    pair.client = nullptr;
    pair.server_channel.expect_event(RDMA_CM_EVENT_DISCONNECTED);
    CHECK(rdma_disconnect(pair.server) == 0);
}

void test_destroy_waits_for_acknowledgement() {
    const EventChannel channel;
    rdma_cm_id* const id = create_id(channel);
    CHECK(rdma_resolve_addr(id, nullptr, IpEndpoint("127.0.0.1", 1), 1000) == 0);
    rdma_cm_event* const event = channel.take_event(RDMA_CM_EVENT_ADDR_RESOLVED);
    std::atomic<bool> is_destroyed{false};
    std::thread destroyer([&] {
        CHECK(rdma_destroy_id(id) == 0);
        is_destroyed = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!is_destroyed);
    CHECK(rdma_ack_cm_event(event) == 0);
    destroyer.join();
}

void test_nonblocking_channel_without_event_fails() {
    const EventChannel channel;
    CHECK(fcntl(channel.channel->fd, F_SETFL, O_NONBLOCK) == 0);
    rdma_cm_event* event = nullptr;
    CHECK_FAILS(rdma_get_cm_event(channel.channel, &event), EAGAIN);
}

void test_migrated_identifier_takes_its_events_along() {
    const EventChannel first_channel, second_channel;
    rdma_cm_id* const id = create_id(first_channel);
    CHECK(rdma_resolve_addr(id, nullptr, IpEndpoint("127.0.0.1", 1), 1000) == 0);
    CHECK(first_channel.is_readable(0) && rdma_migrate_id(id, second_channel.channel) == 0);
    CHECK(!first_channel.is_readable(0) && id->channel == second_channel.channel);
    second_channel.expect_event(RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(rdma_destroy_id(id) == 0);
}

// A program may create its queue pair without rdma_create_qp. Such a client gets the reply of the server as an event,
// connects its queue pair, and then calls rdma_establish.
void test_own_queue_pair_is_established_by_the_program() {
    const EventChannel server_channel, client_channel;
    rdma_cm_id* const listener = create_id(server_channel);
    rdma_cm_id* const client = create_id(client_channel);
    resolve_address_and_route(client_channel, client, "127.0.0.1", listen_on_address(listener, "127.0.0.1"));
    constexpr std::uint32_t client_qp_num = 0x123456, server_qp_num = 0x654321; // no such queue pairs exist
    // The identifier has no queue pair, so the parameters must contain the number of one.
    CHECK_FAILS(rdma_connect(client, nullptr), EINVAL);
    rdma_conn_param parameters = make_parameters(nullptr, 0);
    parameters.qp_num = client_qp_num;
    CHECK(rdma_connect(client, &parameters) == 0);
    rdma_cm_event* const request = server_channel.take_event(RDMA_CM_EVENT_CONNECT_REQUEST);
    rdma_cm_id* const server = request->id;
    CHECK(request->param.conn.qp_num == client_qp_num && rdma_ack_cm_event(request) == 0);
    parameters.qp_num = server_qp_num;
    CHECK(rdma_accept(server, &parameters) == 0);
    client_channel.expect_event(RDMA_CM_EVENT_CONNECT_RESPONSE);
    ibv_qp_attr attr{};
    int attr_mask = 0;
    attr.qp_state = IBV_QPS_RTR;
    CHECK(rdma_init_qp_attr(client, &attr, &attr_mask) == 0);
    CHECK(attr.dest_qp_num == server_qp_num && attr.max_dest_rd_atomic == 3 && (attr_mask & IBV_QP_AV) != 0);
    CHECK(!server_channel.is_readable(50));
    CHECK(rdma_establish(client) == 0);
    server_channel.expect_event(RDMA_CM_EVENT_ESTABLISHED);
    CHECK_FAILS(rdma_notify(server, IBV_EVENT_COMM_EST), EISCONN);
    for (rdma_cm_id* id : {client, server, listener}) {
        CHECK(rdma_destroy_id(id) == 0);
    }
}

void test_calls_in_the_wrong_state_fail() {
    const EventChannel channel;
    rdma_cm_id* const id = create_id(channel);
    CHECK_FAILS(rdma_resolve_route(id, 1000), EINVAL);
    CHECK_FAILS(rdma_connect(id, nullptr), EINVAL);
    CHECK_FAILS(rdma_accept(id, nullptr), EINVAL);
    CHECK_FAILS(rdma_disconnect(id), EINVAL);
    CHECK_FAILS(rdma_reject(id, nullptr, 0), EINVAL);
    ibv_qp_init_attr attributes = make_small_queue_attributes();
    CHECK_FAILS(rdma_create_qp(id, nullptr, &attributes), EINVAL);
    listen_on_address(id, "127.0.0.1");
    CHECK_FAILS(rdma_listen(id, 1), EINVAL);
    CHECK_FAILS(rdma_bind_addr(id, IpEndpoint("127.0.0.1")), EINVAL);
    CHECK_FAILS(rdma_resolve_addr(id, nullptr, IpEndpoint("127.0.0.1", 1), 1000), EINVAL);
    CHECK(rdma_destroy_id(id) == 0);
    // The call has no pointer for the new identifier, and 1 is not a port space.
    CHECK_FAILS(rdma_create_id(channel.channel, nullptr, nullptr, static_cast<rdma_port_space>(1)), EINVAL);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_data_flows_both_ways_after_connect("127.0.0.1");
    test_data_flows_both_ways_after_connect("::1");
    test_request_has_parameters_and_padded_private_data();
    test_too_much_private_data_is_refused();
    test_rejection_has_reason_and_private_data();
    test_port_without_listener_rejects_at_once();
    test_listener_may_return_just_after_the_request();
    test_unknown_host_is_unreachable();
    test_full_backlog_rejects();
    test_disconnect_is_seen_by_both_sides();
    test_destroyed_identifier_disconnects_its_peer();
    test_destroy_waits_for_acknowledgement();
    test_nonblocking_channel_without_event_fails();
    test_migrated_identifier_takes_its_events_along();
    test_own_queue_pair_is_established_by_the_program();
    test_calls_in_the_wrong_state_fail();
    return 0;
}
