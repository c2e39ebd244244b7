// Tests of the software twin of librdmacm: addresses, ports, devices and options.
#include <netdb.h>

#include <algorithm>
#include <vector>

#include "tests/rdmacm_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// Bind a new identifier to the address and destroy it. Return 0, or the errno of rdma_bind_addr.
int bind_and_get_errno(const EventChannel& channel, const char* address, std::uint16_t port,
                       rdma_port_space port_space = RDMA_PS_TCP, bool is_ipv6_only = false) {
    rdma_cm_id* const id = create_id(channel, port_space);
    int afonly_value = is_ipv6_only ? 1 : 0;
    CHECK(rdma_set_option(id, option_level_id, option_afonly, &afonly_value, sizeof afonly_value) == 0);
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
    // Without the option RDMA_OPTION_ID_AFONLY, the wildcard "::" includes IPv4.
    CHECK(bind_and_get_errno(channel, "::", port) == EADDRINUSE);
    CHECK(bind_and_get_errno(channel, "::", port, RDMA_PS_TCP, true) == 0);
    CHECK(bind_and_get_errno(channel, "::1", port) == 0);
    CHECK(bind_and_get_errno(channel, "127.0.0.1", port, RDMA_PS_UDP) == 0); // another port space
    CHECK(rdma_destroy_id(id) == 0);
    CHECK(bind_and_get_errno(channel, "0.0.0.0", port) == 0);
}

// Identifiers with the option RDMA_OPTION_ID_REUSEADDR share a port until one of them listens.
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
    // No host has an address of TEST-NET-1 (RFC 5737).
    CHECK(bind_and_get_errno(channel, "192.0.2.1", 0) == EADDRNOTAVAIL);
    rdma_cm_id* const id = create_id(channel);
    sockaddr_storage unix_address{};
    unix_address.ss_family = AF_UNIX;
    CHECK_FAILS(rdma_bind_addr(id, reinterpret_cast<sockaddr*>(&unix_address)), EINVAL);
    CHECK(rdma_destroy_id(id) == 0);
}

// The GID of a device is a link-local IPv6 address. An identifier that is bound to this address uses that device.
void test_gid_address_selects_its_device() {
    int device_count = 0;
    ibv_context** const devices = rdma_get_devices(&device_count);
    CHECK(devices != nullptr && device_count == 2 && devices[2] == nullptr);
    const EventChannel channel;
    for (int device_index = 0; device_index < device_count; ++device_index) {
        ibv_gid gid{};
        CHECK(ibv_query_gid(devices[device_index], 1, 1, &gid) == 0);
        sockaddr_in6 address{};
        address.sin6_family = AF_INET6;
        std::memcpy(&address.sin6_addr, gid.raw, sizeof gid.raw);
        rdma_cm_id* const id = create_id(channel);
        CHECK(rdma_bind_addr(id, reinterpret_cast<sockaddr*>(&address)) == 0);
        CHECK(id->verbs == devices[device_index]);
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
        // A listener at a wildcard address belongs to no device.
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
    std::uint8_t tos = 32, ack_timeout = 32;
    int four_byte_tos = 1; // the option has one byte
    CHECK(rdma_set_option(id, option_level_id, option_tos, &tos, 1) == 0);
    CHECK_FAILS(rdma_set_option(id, option_level_id, option_tos, &four_byte_tos, sizeof four_byte_tos), EINVAL);
    CHECK_FAILS(rdma_set_option(id, option_level_id, option_ack_timeout, &ack_timeout, 1), EINVAL);
    ack_timeout = 31; // the largest value that fits into five bits
    CHECK(rdma_set_option(id, option_level_id, option_ack_timeout, &ack_timeout, 1) == 0);
    CHECK_FAILS(rdma_set_option(id, option_level_id, 99, &tos, 1), ENOSYS); // unknown option
    CHECK_FAILS(rdma_set_option(id, 7, 0, &tos, 1), ENOSYS);                // unknown level
    // The value is shorter than a path record.
    CHECK_FAILS(rdma_set_option(id, option_level_ib, option_ib_path, &tos, 1), EINVAL);
    CHECK(rdma_destroy_id(id) == 0);
}

void test_names_are_translated() {
    rdma_addrinfo hints{};
    hints.ai_port_space = RDMA_PS_TCP;
    rdma_addrinfo* address_info = nullptr;
    CHECK(rdma_getaddrinfo("127.0.0.1", "7471", &hints, &address_info) == 0);
    CHECK(address_info->ai_family == AF_INET && address_info->ai_qp_type == IBV_QPT_RC &&
          address_info->ai_port_space == RDMA_PS_TCP);
    CHECK(address_info->ai_src_addr == nullptr && address_info->ai_dst_len == sizeof(sockaddr_in) &&
          address_info->ai_next == nullptr);
    CHECK(reinterpret_cast<sockaddr_in*>(address_info->ai_dst_addr)->sin_port == htons(7471));
    rdma_freeaddrinfo(address_info);
    hints.ai_flags = rai_passive;
    hints.ai_port_space = RDMA_PS_UDP;
    CHECK(rdma_getaddrinfo(nullptr, "7471", &hints, &address_info) == 0);
    CHECK(address_info->ai_qp_type == IBV_QPT_UD && address_info->ai_src_addr != nullptr &&
          address_info->ai_dst_addr == nullptr);
    rdma_freeaddrinfo(address_info);
    hints = {};
    IpEndpoint source_address("127.0.0.1", 7471);
    hints.ai_src_addr = source_address;
    hints.ai_src_len = sizeof(sockaddr_in);
    // Without a name and a service, the result has the addresses of the hints.
    CHECK(rdma_getaddrinfo(nullptr, nullptr, &hints, &address_info) == 0);
    CHECK(address_info->ai_src_len == sizeof(sockaddr_in) && address_info->ai_dst_addr == nullptr);
    CHECK(std::memcmp(address_info->ai_src_addr, hints.ai_src_addr, sizeof(sockaddr_in)) == 0);
    rdma_freeaddrinfo(address_info);
    hints = {};
    hints.ai_flags = rai_numeric_host;
    CHECK(rdma_getaddrinfo("not-a-number", "7471", &hints, &address_info) == EAI_NONAME);
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
