// Tests of the endpoint interface, whose calls wait for their events.
#include <thread>

#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

rdma_addrinfo* look_up(const char* service, int flags) {
    rdma_addrinfo hints{};
    hints.ai_flags = flags;
    hints.ai_port_space = RDMA_PS_TCP;
    rdma_addrinfo* info = nullptr;
    CHECK(rdma_getaddrinfo("127.0.0.1", service, &hints, &info) == 0);
    return info;
}

rdma_cm_id* make_endpoint(const char* service, int flags) {
    rdma_addrinfo* const info = look_up(service, flags);
    ibv_qp_init_attr attributes = small_queues();
    rdma_cm_id* id = nullptr;
    CHECK(rdma_create_ep(&id, info, nullptr, &attributes) == 0);
    rdma_freeaddrinfo(info);
    return id;
}

void test_endpoints_connect_and_disconnect() {
    rdma_cm_id* const listener = make_endpoint("20001", rai_passive);
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
    rdma_cm_id* const client = make_endpoint("20001", 0);
    CHECK(client->qp != nullptr && rdma_connect(client, nullptr) == 0);
    CHECK(client->event->event == RDMA_CM_EVENT_ESTABLISHED);
    CHECK(rdma_disconnect(client) == 0);
    server.join();
    rdma_destroy_ep(client);
    rdma_destroy_ep(listener);
}

void test_rejected_endpoint_is_refused() {
    rdma_cm_id* const client = make_endpoint("20002", 0);
    CHECK_FAILS(rdma_connect(client, nullptr), ECONNREFUSED);
    CHECK(client->event->event == RDMA_CM_EVENT_REJECTED && client->event->status == 8);
    rdma_destroy_ep(client);
}

void test_endpoint_moves_to_a_channel_and_back() {
    const EventChannel channel;
    rdma_cm_id* const id = make_endpoint("20003", rai_passive);
    CHECK(rdma_migrate_id(id, channel.channel) == 0 && id->channel == channel.channel);
    CHECK(rdma_migrate_id(id, nullptr) == 0 && id->channel != channel.channel);
    CHECK_FAILS(rdma_migrate_id(id, nullptr), EINVAL);
    rdma_destroy_ep(id);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_endpoints_connect_and_disconnect();
    test_rejected_endpoint_is_refused();
    test_endpoint_moves_to_a_channel_and_back();
    return 0;
}
