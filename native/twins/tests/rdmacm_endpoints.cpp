// Tests of the software twin of librdmacm: the endpoint interface (rdma_create_ep), whose calls wait for their events.
#include <thread>

#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// Look up 127.0.0.1 with a port, for a listener if `flags` is rai_passive, else for a client.
rdma_addrinfo* look_up_address(const char* port_text, int flags, ibv_qp_type type) {
    rdma_addrinfo hints{};
    hints.ai_flags = flags;
    hints.ai_port_space = type == IBV_QPT_RC ? RDMA_PS_TCP : RDMA_PS_IB;
    hints.ai_qp_type = type;
    rdma_addrinfo* address_info = nullptr;
    CHECK(rdma_getaddrinfo("127.0.0.1", port_text, &hints, &address_info) == 0);
    return address_info;
}

rdma_cm_id* create_endpoint(const char* port_text, int flags, ibv_qp_type type = IBV_QPT_RC) {
    rdma_addrinfo* const address_info = look_up_address(port_text, flags, type);
    ibv_qp_init_attr attributes = make_small_queue_attributes();
    rdma_cm_id* id = nullptr;
    CHECK(rdma_create_ep(&id, address_info, nullptr, &attributes) == 0);
    rdma_freeaddrinfo(address_info);
    return id;
}

void test_endpoints_connect_and_disconnect() {
    rdma_cm_id* const listener = create_endpoint("20001", rai_passive);
    CHECK(listener->qp == nullptr && rdma_listen(listener, 0) == 0);
    std::thread server_thread([&] {
        rdma_cm_id* server = nullptr;
        CHECK(rdma_get_request(listener, &server) == 0);
        CHECK(server->qp != nullptr && server->channel != listener->channel);
        CHECK(server->event->event == RDMA_CM_EVENT_CONNECT_REQUEST &&
              server->event->param.conn.private_data_len == 56);
        CHECK(rdma_accept(server, nullptr) == 0);
        CHECK(server->event->event == RDMA_CM_EVENT_ESTABLISHED);
        CHECK(rdma_disconnect(server) == 0);
        rdma_destroy_ep(server);
    });
    rdma_cm_id* const client = create_endpoint("20001", 0);
    CHECK(client->qp != nullptr && rdma_connect(client, nullptr) == 0);
    CHECK(client->event->event == RDMA_CM_EVENT_ESTABLISHED);
    CHECK(rdma_disconnect(client) == 0);
    server_thread.join();
    rdma_destroy_ep(client);
    rdma_destroy_ep(listener);
}

void test_rejected_endpoint_is_refused() {
    rdma_cm_id* const client = create_endpoint("20002", 0);
    CHECK_FAILS(rdma_connect(client, nullptr), ECONNREFUSED);
    CHECK(client->event->event == RDMA_CM_EVENT_REJECTED && client->event->status == no_listener_status);
    rdma_destroy_ep(client);
}

// An endpoint has an internal channel, and its calls wait for their events. After rdma_migrate_id to a channel of the
// program, the calls no longer wait. The channel nullptr stands for a new internal channel.
void test_endpoint_moves_to_a_channel_and_back() {
    const EventChannel channel;
    rdma_cm_id* const id = create_endpoint("20003", rai_passive);
    CHECK(rdma_migrate_id(id, channel.channel) == 0 && id->channel == channel.channel);
    CHECK(rdma_migrate_id(id, nullptr) == 0 && id->channel != channel.channel);
    CHECK_FAILS(rdma_migrate_id(id, nullptr), EINVAL); // the channel is internal already
    rdma_destroy_ep(id);
}

// The test makes the same calls as rdma_xclient and rdma_xserver, two example programs of rdma-core, with `-c x`. The
// server creates a shared receive queue, and sends its number to the client as private data. librdmacm creates the XRC
// domain and the completion queue of the server.
void test_xrc_endpoints_exchange_a_message() {
    std::uint8_t received_bytes[16] = {}, sent_bytes[16] = {1, 2, 3};
    rdma_cm_id* const listener = create_endpoint("20004", rai_passive, IBV_QPT_XRC_RECV);
    CHECK(rdma_listen(listener, 0) == 0);
    std::thread server_thread([&] {
        rdma_cm_id* server = nullptr;
        CHECK(rdma_get_request(listener, &server) == 0 && server->qp->qp_type == IBV_QPT_XRC_RECV);
        ibv_srq_init_attr srq_attributes{nullptr, {1, 1, 0}};
        std::uint32_t srq_number = 0;
        CHECK(rdma_create_srq(server, nullptr, &srq_attributes) == 0 && ibv_get_srq_num(server->srq, &srq_number) == 0);
        ibv_mr* const mr = ibv_reg_mr(server->pd, received_bytes, sizeof received_bytes, IBV_ACCESS_LOCAL_WRITE);
        ibv_sge sge{reinterpret_cast<std::uint64_t>(received_bytes), sizeof received_bytes, mr->lkey};
        ibv_recv_wr receive_wr{5, nullptr, &sge, 1}, *bad_receive_wr = nullptr;
        CHECK(ibv_post_srq_recv(server->srq, &receive_wr, &bad_receive_wr) == 0);
        rdma_conn_param parameters = make_parameters(&srq_number, sizeof srq_number);
        CHECK(rdma_accept(server, &parameters) == 0);
        ibv_wc wc{};
        while (ibv_poll_cq(server->recv_cq, 1, &wc) == 0) {
        }
        CHECK(wc.wr_id == 5 && wc.status == IBV_WC_SUCCESS &&
              std::memcmp(received_bytes, sent_bytes, sizeof sent_bytes) == 0);
        rdma_disconnect(server);
        CHECK(ibv_dereg_mr(mr) == 0);
        rdma_destroy_ep(server);
    });
    rdma_cm_id* const client = create_endpoint("20004", 0, IBV_QPT_XRC_SEND);
    CHECK(rdma_connect(client, nullptr) == 0);
    ibv_sge sge{reinterpret_cast<std::uint64_t>(sent_bytes), sizeof sent_bytes, 0}; // inline data needs no lkey
    ibv_send_wr send_wr{}, *bad_send_wr = nullptr;
    send_wr.sg_list = &sge;
    send_wr.num_sge = 1;
    send_wr.opcode = IBV_WR_SEND;
    // make_small_queue_attributes() requests no space for inline data. Like Soft-RoCE, the twin nevertheless gives a
    // queue pair the 16 bytes of each scatter-gather entry.
    send_wr.send_flags = IBV_SEND_INLINE;
    std::memcpy(&send_wr.qp_type.xrc.remote_srqn, client->event->param.conn.private_data, sizeof(std::uint32_t));
    CHECK(ibv_post_send(client->qp, &send_wr, &bad_send_wr) == 0);
    ibv_wc wc{};
    while (ibv_poll_cq(client->send_cq, 1, &wc) == 0) {
    }
    CHECK(wc.status == IBV_WC_SUCCESS);
    rdma_disconnect(client);
    server_thread.join();
    rdma_destroy_ep(client);
    rdma_destroy_ep(listener);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_endpoints_connect_and_disconnect();
    test_rejected_endpoint_is_refused();
    test_endpoint_moves_to_a_channel_and_back();
    test_xrc_endpoints_exchange_a_message();
    return 0;
}
