// Tests of the software twin of librdmacm: addresses, ports, devices and options.
#include <netdb.h>

#include <algorithm>
#include <vector>

#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

int bind_and_get_errno(const EventChannel& channel, const char* address, std::uint16_t port,
                       rdma_port_space ps = RDMA_PS_TCP, bool ipv6_only = false) {
    rdma_cm_id* const id = create_id(channel, ps);
    int afonly = ipv6_only ? 1 : 0;
    CHECK(rdma_set_option(id, option_level_id, option_afonly, &afonly, sizeof afonly) == 0);
    errno = 0;
    const int error = rdma_bind_addr(id, IpEndpoint(address, port)) == 0 ? 0 : errno;
    CHECK(rdma_destroy_id(id) == 0);
    return error;
}

void test_taken_port_is_refused_until_it_is_free() {
    const EventChannel channel;
    rdma_cm_id* const id = create_id(channel);
    CHECK(rdma_bind_addr(id, IpEndpoint("127.0.0.1", 0)) == 0 && id->verbs != nullptr && id->pd != nullptr);
    const std::uint16_t port = ntohs(rdma_get_src_port(id));
    CHECK(port >= 1024);
    CHECK(bind_and_get_errno(channel, "127.0.0.1", port) == EADDRINUSE);
    CHECK(bind_and_get_errno(channel, "0.0.0.0", port) == EADDRINUSE);
    CHECK(bind_and_get_errno(channel, "::", port) == EADDRINUSE);
    CHECK(bind_and_get_errno(channel, "::", port, RDMA_PS_TCP, true) == 0);
    CHECK(bind_and_get_errno(channel, "::1", port) == 0);
    CHECK(bind_and_get_errno(channel, "127.0.0.1", port, RDMA_PS_UDP) == 0); // another port space
    CHECK(rdma_destroy_id(id) == 0);
    CHECK(bind_and_get_errno(channel, "0.0.0.0", port) == 0);
}

void test_shared_port_is_exclusive_for_a_listener() {
    const EventChannel channel;
    rdma_cm_id* ids[2];
    int enable = 1;
    for (rdma_cm_id*& id : ids) {
        id = create_id(channel);
        CHECK(rdma_set_option(id, option_level_id, option_reuseaddr, &enable, sizeof enable) == 0);
        CHECK(rdma_bind_addr(id, IpEndpoint("127.0.0.1", 21000)) == 0);
    }
    CHECK(rdma_listen(ids[0], 1) == 0);
    CHECK_FAILS(rdma_listen(ids[1], 1), EADDRINUSE);
    for (rdma_cm_id* id : ids) {
        CHECK(rdma_destroy_id(id) == 0);
    }
}

void test_foreign_address_is_not_available() {
    const EventChannel channel;
    CHECK(bind_and_get_errno(channel, "192.0.2.1", 0) == EADDRNOTAVAIL);
    rdma_cm_id* const id = create_id(channel);
    sockaddr_storage unknown{};
    unknown.ss_family = AF_UNIX;
    CHECK_FAILS(rdma_bind_addr(id, reinterpret_cast<sockaddr*>(&unknown)), EINVAL);
    CHECK(rdma_destroy_id(id) == 0);
}

// The link-local address of a device's GID selects that device.
void test_gid_address_selects_its_device() {
    int count = 0;
    ibv_context** const devices = rdma_get_devices(&count);
    CHECK(devices != nullptr && count == 2 && devices[2] == nullptr);
    const EventChannel channel;
    for (int index = 0; index < count; ++index) {
        ibv_gid gid{};
        CHECK(ibv_query_gid(devices[index], 1, 1, &gid) == 0);
        sockaddr_in6 address{};
        address.sin6_family = AF_INET6;
        std::memcpy(&address.sin6_addr, gid.raw, sizeof gid.raw);
        rdma_cm_id* const id = create_id(channel);
        CHECK(rdma_bind_addr(id, reinterpret_cast<sockaddr*>(&address)) == 0);
        CHECK(id->verbs == devices[index]);
        CHECK(std::memcmp(id->route.addr.addr.ibaddr.sgid.raw, gid.raw, sizeof gid.raw) == 0);
        CHECK(rdma_destroy_id(id) == 0);
    }
    rdma_free_devices(devices);
}

void test_wildcard_listener_of_both_families_accepts_both() {
    for (const char* address : {"127.0.0.1", "::1"}) {
        const EventChannel server_channel, client_channel;
        rdma_cm_id* const listener = create_id(server_channel);
        rdma_cm_id* const client = create_id(client_channel);
        resolve_address_and_route(client_channel, client, address, listen_on_address(listener, "::"));
        create_queue_pair(client);
        CHECK(listener->verbs == nullptr && rdma_connect(client, nullptr) == 0);
        rdma_cm_event* const request = server_channel.take_event(RDMA_CM_EVENT_CONNECT_REQUEST);
        rdma_cm_id* const server = request->id;
        CHECK(rdma_ack_cm_event(request) == 0);
        CHECK(server->route.addr.src_addr.sa_family == client->route.addr.dst_addr.sa_family);
        rdma_destroy_qp(client);
        for (rdma_cm_id* id : {client, server, listener}) {
            CHECK(rdma_destroy_id(id) == 0);
        }
    }
}

void test_options_check_their_values() {
    const EventChannel channel;
    rdma_cm_id* const id = create_id(channel);
    std::uint8_t byte = 32;
    int too_large_value = 1; // the option has one byte
    CHECK(rdma_set_option(id, option_level_id, option_tos, &byte, 1) == 0);
    CHECK_FAILS(rdma_set_option(id, option_level_id, option_tos, &too_large_value, sizeof too_large_value), EINVAL);
    CHECK_FAILS(rdma_set_option(id, option_level_id, option_ack_timeout, &byte, 1), EINVAL);
    byte = 31;
    CHECK(rdma_set_option(id, option_level_id, option_ack_timeout, &byte, 1) == 0);
    CHECK_FAILS(rdma_set_option(id, option_level_id, 99, &byte, 1), ENOSYS);
    CHECK_FAILS(rdma_set_option(id, 7, 0, &byte, 1), ENOSYS);
    CHECK_FAILS(rdma_set_option(id, option_level_ib, option_ib_path, &byte, 1), EINVAL);
    CHECK(rdma_destroy_id(id) == 0);
}

void test_names_are_translated() {
    rdma_addrinfo hints{};
    hints.ai_port_space = RDMA_PS_TCP;
    rdma_addrinfo* info = nullptr;
    CHECK(rdma_getaddrinfo("127.0.0.1", "7471", &hints, &info) == 0);
    CHECK(info->ai_family == AF_INET && info->ai_qp_type == IBV_QPT_RC && info->ai_port_space == RDMA_PS_TCP);
    CHECK(info->ai_src_addr == nullptr && info->ai_dst_len == sizeof(sockaddr_in) && info->ai_next == nullptr);
    CHECK(reinterpret_cast<sockaddr_in*>(info->ai_dst_addr)->sin_port == htons(7471));
    rdma_freeaddrinfo(info);
    hints.ai_flags = rai_passive;
    hints.ai_port_space = RDMA_PS_UDP;
    CHECK(rdma_getaddrinfo(nullptr, "7471", &hints, &info) == 0);
    CHECK(info->ai_qp_type == IBV_QPT_UD && info->ai_src_addr != nullptr && info->ai_dst_addr == nullptr);
    rdma_freeaddrinfo(info);
    hints = {};
    IpEndpoint source("127.0.0.1", 7471);
    hints.ai_src_addr = source;
    hints.ai_src_len = sizeof(sockaddr_in);
    CHECK(rdma_getaddrinfo(nullptr, nullptr, &hints, &info) == 0); // the entry has the addresses of the hints
    CHECK(info->ai_src_len == sizeof(sockaddr_in) && info->ai_dst_addr == nullptr);
    CHECK(std::memcmp(info->ai_src_addr, hints.ai_src_addr, sizeof(sockaddr_in)) == 0);
    rdma_freeaddrinfo(info);
    hints = {};
    hints.ai_flags = rai_numeric_host;
    CHECK(rdma_getaddrinfo("not-a-number", "7471", &hints, &info) == EAI_NONAME);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_taken_port_is_refused_until_it_is_free();
    test_shared_port_is_exclusive_for_a_listener();
    test_foreign_address_is_not_available();
    test_gid_address_selects_its_device();
    test_wildcard_listener_of_both_families_accepts_both();
    test_options_check_their_values();
    test_names_are_translated();
    return 0;
}
