// Helpers for the tests of the software twin of librdmacm: addresses, identifiers and expected events.
#pragma once

#include <arpa/inet.h>
#include <poll.h>

#include <cstring>
#include <string>

#include "rdmacm/functions.hpp"
#include "tests/ibverbs_support.hpp"

namespace gdrkit::twin::tests {

using namespace gdrkit::twin::rdmacm;

// Statuses of RDMA_CM_EVENT_REJECTED: IB_CM_REJ_INVALID_SERVICE_ID and IB_CM_REJ_CONSUMER_DEFINED.
constexpr int no_listener_status = 8, rejected_by_program_status = 28;

// An IPv4 or IPv6 address with a port.
struct IpEndpoint {
    sockaddr_storage storage{};
    explicit IpEndpoint(const char* address_text, std::uint16_t port = 0) {
        auto& ipv4 = reinterpret_cast<sockaddr_in&>(storage);
        auto& ipv6 = reinterpret_cast<sockaddr_in6&>(storage);
        if (inet_pton(AF_INET, address_text, &ipv4.sin_addr) == 1) {
            ipv4.sin_family = AF_INET;
            ipv4.sin_port = htons(port);
            return;
        }
        CHECK(inet_pton(AF_INET6, address_text, &ipv6.sin6_addr) == 1);
        ipv6.sin6_family = AF_INET6;
        ipv6.sin6_port = htons(port);
    }
    operator sockaddr*() { return reinterpret_cast<sockaddr*>(&storage); }
};

// An event channel, with functions that take the next event and check it.
struct EventChannel {
    rdma_event_channel* channel = rdma_create_event_channel();
    EventChannel() { CHECK(channel != nullptr); }
    ~EventChannel() { rdma_destroy_event_channel(channel); }
    EventChannel(const EventChannel&) = delete;
    EventChannel& operator=(const EventChannel&) = delete;

    [[nodiscard]] bool is_readable(int timeout_ms) const {
        pollfd poll_fd{channel->fd, POLLIN, 0};
        return poll(&poll_fd, 1, timeout_ms) == 1;
    }
    // Take the next event, which must have this type. The caller acknowledges it.
    [[nodiscard]] rdma_cm_event* take_event(rdma_cm_event_type type) const {
        rdma_cm_event* event = nullptr;
        CHECK(is_readable(30'000));
        CHECK(rdma_get_cm_event(channel, &event) == 0);
        if (event->event != type) {
            std::fprintf(stderr, "expected %s, got %s with status %d\n", rdma_event_str(type),
                         rdma_event_str(event->event), event->status);
        }
        CHECK(event->event == type);
        return event;
    }
    // Take the next event, check its type and status, and acknowledge it.
    void expect_event(rdma_cm_event_type type, int status = 0) const {
        rdma_cm_event* const event = take_event(type);
        if (event->status != status) {
            std::fprintf(stderr, "expected status %d, got %d\n", status, event->status);
        }
        CHECK(event->status == status);
        CHECK(rdma_ack_cm_event(event) == 0);
    }
};

inline rdma_cm_id* create_id(const EventChannel& channel, rdma_port_space ps = RDMA_PS_TCP) {
    rdma_cm_id* id = nullptr;
    CHECK(rdma_create_id(channel.channel, &id, nullptr, ps) == 0 && id->channel == channel.channel && id->ps == ps);
    return id;
}

// Bind the identifier to an address and listen. Return the port, which the twin chooses if `port` is 0.
inline std::uint16_t listen_on_address(rdma_cm_id* id, const char* address, std::uint16_t port = 0, int backlog = 8) {
    CHECK(rdma_bind_addr(id, IpEndpoint(address, port)) == 0);
    CHECK(rdma_listen(id, backlog) == 0);
    return ntohs(rdma_get_src_port(id));
}

inline ibv_qp_init_attr make_small_queue_attributes(ibv_qp_type type = IBV_QPT_RC) {
    ibv_qp_init_attr attributes{};
    // The members are the maximum numbers of send and receive work requests, of SGEs of each, and of inline bytes.
    attributes.cap = {4, 4, 1, 1, 0};
    attributes.qp_type = type;
    attributes.sq_sig_all = 1;
    return attributes;
}

// Resolve the address and the route of an identifier.
inline void resolve_address_and_route(const EventChannel& channel, rdma_cm_id* id, const char* address,
                                      std::uint16_t port) {
    CHECK(rdma_resolve_addr(id, nullptr, IpEndpoint(address, port), 1000) == 0);
    channel.expect_event(RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(id->verbs != nullptr && id->port_num == 1);
    CHECK(rdma_resolve_route(id, 1000) == 0);
    channel.expect_event(RDMA_CM_EVENT_ROUTE_RESOLVED);
    CHECK(id->route.num_paths == 1);
}

inline void create_queue_pair(rdma_cm_id* id) {
    ibv_qp_init_attr attributes = make_small_queue_attributes();
    CHECK(rdma_create_qp(id, nullptr, &attributes) == 0 && id->qp != nullptr && id->pd != nullptr);
    CHECK(id->send_cq != nullptr && id->recv_cq != nullptr && id->recv_cq_channel != nullptr);
}

inline rdma_conn_param make_parameters(const void* data, std::size_t size_bytes) {
    rdma_conn_param parameters{};
    parameters.private_data = data;
    parameters.private_data_len = static_cast<std::uint8_t>(size_bytes);
    parameters.responder_resources = 2;
    parameters.initiator_depth = 3;
    parameters.retry_count = 5;
    parameters.rnr_retry_count = 6;
    return parameters;
}

// Make the call, and check that it returns -1 with this errno.
#define CHECK_FAILS(call, expected_errno)                                                                              \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        CHECK((call) == -1);                                                                                           \
        CHECK(errno == (expected_errno));                                                                              \
    } while (0)

// A listener and a client identifier, each with its own channel. The client has a queue pair and a resolved route to
// the listener. send_request() sends the connection request, and returns the event that the listener gets. establish()
// also accepts the request.
struct ConnectionPair {
    EventChannel server_channel, client_channel;
    rdma_cm_id* listener = create_id(server_channel);
    rdma_cm_id* client = create_id(client_channel);
    rdma_cm_id* server = nullptr;
    std::uint16_t port = 0;

    explicit ConnectionPair(const char* address = "127.0.0.1") {
        port = listen_on_address(listener, address);
        resolve_address_and_route(client_channel, client, address, port);
        create_queue_pair(client);
    }
    rdma_cm_event* send_request(const std::string& data = {}) {
        rdma_conn_param parameters = make_parameters(data.data(), data.size());
        CHECK(rdma_connect(client, &parameters) == 0);
        rdma_cm_event* const event = server_channel.take_event(RDMA_CM_EVENT_CONNECT_REQUEST);
        server = event->id;
        return event;
    }
    void establish() {
        CHECK(rdma_ack_cm_event(send_request()) == 0);
        create_queue_pair(server);
        rdma_conn_param parameters = make_parameters(nullptr, 0);
        CHECK(rdma_accept(server, &parameters) == 0);
        client_channel.expect_event(RDMA_CM_EVENT_ESTABLISHED);
        server_channel.expect_event(RDMA_CM_EVENT_ESTABLISHED);
    }
    ~ConnectionPair() {
        for (rdma_cm_id* id : {client, server, listener}) {
            if (id != nullptr) {
                rdma_destroy_qp(id);
                CHECK(rdma_destroy_id(id) == 0);
            }
        }
    }
    ConnectionPair(const ConnectionPair&) = delete;
    ConnectionPair& operator=(const ConnectionPair&) = delete;
};

} // namespace gdrkit::twin::tests
