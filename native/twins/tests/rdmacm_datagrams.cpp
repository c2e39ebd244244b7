// Tests of the software twin of librdmacm: datagram identifiers (RDMA_PS_UDP), which request the address of the
// server's queue pair, multicast groups, and injected failures.
#include "control/control.h"
#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// A received datagram begins with space for the global routing header (GRH).
constexpr std::size_t grh_bytes = 40, payload_bytes = 32;

// A listener and a client of datagrams, each with its own channel. send_request() sends the request of the client,
// takes the event of the request at the listener, and sets `server`.
struct DatagramPair {
    EventChannel server_channel, client_channel;
    rdma_cm_id* listener = create_id(server_channel, RDMA_PS_UDP);
    rdma_cm_id* client = create_id(client_channel, RDMA_PS_UDP);
    rdma_cm_id* server = nullptr;

    void send_request() {
        resolve_address_and_route(client_channel, client, "127.0.0.1", listen_on_address(listener, "127.0.0.1"));
        rdma_conn_param parameters{};
        parameters.private_data = "hello";
        parameters.private_data_len = 5;
        CHECK(rdma_connect(client, &parameters) == 0);
        rdma_cm_event* const event = server_channel.take_event(RDMA_CM_EVENT_CONNECT_REQUEST);
        // The event has the whole private data field of the message, padded with zeros. A request has 180 bytes.
        CHECK(event->param.ud.private_data_len == 180);
        CHECK(std::memcmp(event->param.ud.private_data, "hello\0", 6) == 0);
        server = event->id;
        CHECK(rdma_ack_cm_event(event) == 0);
    }
    ~DatagramPair() {
        for (rdma_cm_id* id : {client, server, listener}) {
            if (id != nullptr) {
                rdma_destroy_qp(id);
                CHECK(rdma_destroy_id(id) == 0);
            }
        }
    }
};

void create_datagram_queue_pair(rdma_cm_id* id) {
    ibv_qp_init_attr attributes = make_small_queue_attributes(IBV_QPT_UD);
    CHECK(rdma_create_qp(id, nullptr, &attributes) == 0);
}

void post_receive(rdma_cm_id* id, const Buffer& buffer) {
    ibv_sge sge = buffer.sge(0, grh_bytes + payload_bytes);
    ibv_recv_wr receive_wr{1, nullptr, &sge, 1};
    ibv_recv_wr* bad_receive_wr = nullptr;
    CHECK(ibv_post_recv(id->qp, &receive_wr, &bad_receive_wr) == 0);
}

// Send the pattern to the address in an event, and wait until the receiver has the pattern.
void send_and_check(rdma_cm_id* sender, const rdma_ud_param& address, rdma_cm_id* receiver,
                    const Buffer& receive_buffer) {
    const Buffer send_buffer(sender->pd, payload_bytes);
    fill_pattern(send_buffer.bytes, payload_bytes);
    ibv_ah_attr ah_attr = address.ah_attr;
    ibv_ah* const ah = ibv_create_ah(sender->pd, &ah_attr);
    CHECK(ah != nullptr);
    ibv_sge sge = send_buffer.sge(0, payload_bytes);
    ibv_send_wr send_wr{};
    send_wr.sg_list = &sge;
    send_wr.num_sge = 1;
    send_wr.opcode = IBV_WR_SEND;
    send_wr.wr.ud.ah = ah;
    send_wr.wr.ud.remote_qpn = address.qp_num;
    send_wr.wr.ud.remote_qkey = address.qkey;
    ibv_send_wr* bad_send_wr = nullptr;
    CHECK(ibv_post_send(sender->qp, &send_wr, &bad_send_wr) == 0);
    for (ibv_cq* cq : {sender->send_cq, receiver->recv_cq}) {
        ibv_wc wc{};
        while (ibv_poll_cq(cq, 1, &wc) == 0) {
            usleep(100);
        }
        CHECK(wc.status == IBV_WC_SUCCESS);
    }
    CHECK(has_pattern(receive_buffer.bytes + grh_bytes, payload_bytes));
    CHECK(ibv_destroy_ah(ah) == 0);
}

void test_accepted_request_has_the_address_of_the_peer() {
    DatagramPair pair;
    pair.send_request();
    create_datagram_queue_pair(pair.client);
    create_datagram_queue_pair(pair.server);
    const Buffer receive_buffer(pair.server->pd, grh_bytes + payload_bytes);
    post_receive(pair.server, receive_buffer);
    rdma_conn_param parameters{};
    CHECK(rdma_accept(pair.server, &parameters) == 0);
    rdma_cm_event* const event = pair.client_channel.take_event(RDMA_CM_EVENT_ESTABLISHED);
    CHECK(event->param.ud.qp_num == pair.server->qp->qp_num && event->param.ud.qkey == udp_qkey);
    // The private data field of a reply has 136 bytes.
    CHECK(event->param.ud.private_data_len == 136 && event->param.ud.ah_attr.is_global == 1);
    send_and_check(pair.client, event->param.ud, pair.server, receive_buffer);
    CHECK(rdma_ack_cm_event(event) == 0);
    CHECK(!pair.server_channel.is_readable(0));        // the accepting side sees no event
    CHECK_FAILS(rdma_disconnect(pair.client), EINVAL); // a datagram identifier has no connection
}

void test_failed_requests_have_the_status_of_the_reply() {
    DatagramPair pair;
    pair.send_request();
    CHECK(rdma_reject(pair.server, "no", 2) == 0);
    pair.client_channel.expect_event(RDMA_CM_EVENT_UNREACHABLE, 2); // IB_SIDR_REJECT
    rdma_cm_id* const id = create_id(pair.client_channel, RDMA_PS_UDP);
    resolve_address_and_route(pair.client_channel, id, "127.0.0.1", 7474);
    rdma_conn_param parameters{};
    CHECK(rdma_connect(id, &parameters) == 0);
    pair.client_channel.expect_event(RDMA_CM_EVENT_UNREACHABLE, 1); // IB_SIDR_UNSUPPORTED: no listener
    CHECK(rdma_destroy_id(id) == 0);
}

void test_group_member_gets_messages_until_it_leaves() {
    const EventChannel channel;
    rdma_cm_id* ids[2]; // the member of the group, and the sender
    for (rdma_cm_id*& id : ids) {
        id = create_id(channel, RDMA_PS_UDP);
        CHECK(rdma_bind_addr(id, IpEndpoint("127.0.0.1")) == 0);
        create_datagram_queue_pair(id);
    }
    IpEndpoint group("239.1.2.3");
    int join_context = 0;
    CHECK_FAILS(rdma_join_multicast(ids[0], IpEndpoint("127.0.0.1"), nullptr), EINVAL); // not a multicast address
    CHECK(rdma_join_multicast(ids[0], group, &join_context) == 0);
    rdma_cm_event* const event = channel.take_event(RDMA_CM_EVENT_MULTICAST_JOIN);
    // InfiniBand sends all multicast packets to the queue pair number 0xffffff.
    CHECK(event->id == ids[0] && event->param.ud.private_data == &join_context && event->param.ud.qp_num == 0xffffff);
    {
        const Buffer receive_buffer(ids[0]->pd, grh_bytes + payload_bytes);
        post_receive(ids[0], receive_buffer);
        send_and_check(ids[1], event->param.ud, ids[0], receive_buffer);
    }
    CHECK(rdma_ack_cm_event(event) == 0);
    CHECK(rdma_leave_multicast(ids[0], group) == 0);
    CHECK_FAILS(rdma_leave_multicast(ids[0], group), EADDRNOTAVAIL);
    for (rdma_cm_id* id : ids) {
        rdma_destroy_qp(id);
        CHECK(rdma_destroy_id(id) == 0);
    }
}

void test_planned_failure_is_reported_once() {
    const EventChannel channel;
    rdma_cm_id* const id = create_id(channel);
    CHECK(gdrkit_twin_faults("gdrkit-faults 1\nrdma_bind_addr call=1 errno=ENOMEM\n") == 0);
    CHECK_FAILS(rdma_bind_addr(id, IpEndpoint("127.0.0.1")), ENOMEM);
    CHECK(rdma_bind_addr(id, IpEndpoint("127.0.0.1")) == 0);
    // The twin refuses a plan with rdma_event_str, because this function returns no error.
    CHECK(gdrkit_twin_faults("gdrkit-faults 1\nrdma_event_str call=1 errno=ENOMEM\n") == EINVAL);
    CHECK(rdma_destroy_id(id) == 0);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_planned_failure_is_reported_once();
    test_accepted_request_has_the_address_of_the_peer();
    test_failed_requests_have_the_status_of_the_reply();
    test_group_member_gets_messages_until_it_leaves();
    return 0;
}
