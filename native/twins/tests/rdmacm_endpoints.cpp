// Tests of the software twin of librdmacm: the endpoint interface (rdma_create_ep), whose calls wait for their events.
#include <thread>

#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

rdma_addrinfo* look_up_address(const char* service, int flags, ibv_qp_type type) {
    rdma_addrinfo hints{};
    hints.ai_flags = flags;
    hints.ai_port_space = type == IBV_QPT_RC ? RDMA_PS_TCP : RDMA_PS_IB;
    hints.ai_qp_type = type;
    rdma_addrinfo* info = nullptr;
    CHECK(rdma_getaddrinfo("127.0.0.1", service, &hints, &info) == 0);
    return info;
}

rdma_cm_id* create_endpoint(const char* service, int flags, ibv_qp_type type = IBV_QPT_RC) {
    rdma_addrinfo* const info = look_up_address(service, flags, type);
    ibv_qp_init_attr attributes = make_small_queue_attributes();
    rdma_cm_id* id = nullptr;
    CHECK(rdma_create_ep(&id, info, nullptr, &attributes) == 0);
    rdma_freeaddrinfo(info);
    return id;
}

void test_endpoints_connect_and_disconnect() {
    rdma_cm_id* const listener = create_endpoint("20001", rai_passive);
    CHECK(listener->qp == nullptr && rdma_listen(listener, 0) == 0);
    std::thread server([&] {
        rdma_cm_id* id = nullptr;
        CHECK(rdma_get_request(listener, &id) == 0);
        CHECK(id->qp != nullptr && id->channel != listener->channel);
        CHECK(id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST && id->event->param.conn.private_data_len == 56);
        CHECK(rdma_accept(id, nullptr) == 0);
        CHECK(id->event->event == RDMA_CM_EVENT_ESTABLISHED);
        CHECK(rdma_disconnect(id) == 0);
        rdma_destroy_ep(id);
    });
    rdma_cm_id* const client = create_endpoint("20001", 0);
    CHECK(client->qp != nullptr && rdma_connect(client, nullptr) == 0);
    CHECK(client->event->event == RDMA_CM_EVENT_ESTABLISHED);
    CHECK(rdma_disconnect(client) == 0);
    server.join();
    rdma_destroy_ep(client);
    rdma_destroy_ep(listener);
}

void test_rejected_endpoint_is_refused() {
    rdma_cm_id* const client = create_endpoint("20002", 0);
    CHECK_FAILS(rdma_connect(client, nullptr), ECONNREFUSED);
    CHECK(client->event->event == RDMA_CM_EVENT_REJECTED && client->event->status == no_listener_status);
    rdma_destroy_ep(client);
}

void test_endpoint_moves_to_a_channel_and_back() {
    const EventChannel channel;
    rdma_cm_id* const id = create_endpoint("20003", rai_passive);
    CHECK(rdma_migrate_id(id, channel.channel) == 0 && id->channel == channel.channel);
    CHECK(rdma_migrate_id(id, nullptr) == 0 && id->channel != channel.channel);
    CHECK_FAILS(rdma_migrate_id(id, nullptr), EINVAL);
    rdma_destroy_ep(id);
}

// The test makes the calls of rdma_xclient and rdma_xserver with `-c x`. The library creates an XRC domain, a receive
// queue and their completion queue for the server.
void test_xrc_endpoints_exchange_a_message() {
    std::uint8_t received[16] = {}, sent[16] = {1, 2, 3};
    rdma_cm_id* const listener = create_endpoint("20004", rai_passive, IBV_QPT_XRC_RECV);
    CHECK(rdma_listen(listener, 0) == 0);
    std::thread server([&] {
        rdma_cm_id* id = nullptr;
        CHECK(rdma_get_request(listener, &id) == 0 && id->qp->qp_type == IBV_QPT_XRC_RECV);
        ibv_srq_init_attr attributes{nullptr, {1, 1, 0}};
        std::uint32_t srq_number = 0;
        CHECK(rdma_create_srq(id, nullptr, &attributes) == 0 && ibv_get_srq_num(id->srq, &srq_number) == 0);
        ibv_mr* const region = ibv_reg_mr(id->pd, received, sizeof received, IBV_ACCESS_LOCAL_WRITE);
        ibv_sge sge{reinterpret_cast<std::uint64_t>(received), sizeof received, region->lkey};
        ibv_recv_wr request{5, nullptr, &sge, 1}, *bad_request = nullptr;
        CHECK(ibv_post_srq_recv(id->srq, &request, &bad_request) == 0);
        rdma_conn_param parameters = make_parameters(&srq_number, sizeof srq_number);
        CHECK(rdma_accept(id, &parameters) == 0);
        ibv_wc wc{};
        while (ibv_poll_cq(id->recv_cq, 1, &wc) == 0) {
        }
        CHECK(wc.wr_id == 5 && wc.status == IBV_WC_SUCCESS && std::memcmp(received, sent, sizeof sent) == 0);
        rdma_disconnect(id);
        CHECK(ibv_dereg_mr(region) == 0);
        rdma_destroy_ep(id);
    });
    rdma_cm_id* const client = create_endpoint("20004", 0, IBV_QPT_XRC_SEND);
    CHECK(rdma_connect(client, nullptr) == 0);
    ibv_sge sge{reinterpret_cast<std::uint64_t>(sent), sizeof sent, 0};
    ibv_send_wr request{}, *bad_request = nullptr;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = IBV_WR_SEND;
    // The program has requested no space for inline data, but a queue pair has space for as many bytes as a
    // scatter-gather entry.
    request.send_flags = IBV_SEND_INLINE;
    std::memcpy(&request.qp_type.xrc.remote_srqn, client->event->param.conn.private_data, sizeof(std::uint32_t));
    CHECK(ibv_post_send(client->qp, &request, &bad_request) == 0);
    ibv_wc wc{};
    while (ibv_poll_cq(client->send_cq, 1, &wc) == 0) {
    }
    CHECK(wc.status == IBV_WC_SUCCESS);
    rdma_disconnect(client);
    server.join();
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
