// The endpoint interface of librdmacm (rdma_create_ep, rdma_get_request). An endpoint is a synchronous rdma_cm_id: each
// call waits for the event that completes it.

#include <cstring>

#include "rdmacm/connection.hpp"
#include "rdmacm/functions.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

constexpr int resolve_timeout_ms = 2000;

// Return the errno of a call that returned `result`: 0, or -1 with errno set.
int get_errno(int result) {
    return result == 0 ? 0 : errno;
}

int bind_endpoint(rdma_cm_id* id, const rdma_addrinfo& address_info) {
    return get_errno(rdma_bind_addr(id, address_info.ai_src_addr));
}

int resolve_endpoint(rdma_cm_id* id, const rdma_addrinfo& address_info) {
    const int error =
        get_errno(rdma_resolve_addr(id, address_info.ai_src_addr, address_info.ai_dst_addr, resolve_timeout_ms));
    return error != 0 ? error : get_errno(rdma_resolve_route(id, resolve_timeout_ms));
}

// Create the queue pair of an active endpoint. For a passive endpoint, store the attributes: rdma_get_request creates
// the queue pair of each new connection with them. Without attributes (nullptr), the program creates the queue pairs.
int add_queue_pair(Identifier* identifier, bool is_passive, ibv_pd* pd, ibv_qp_init_attr* attributes) {
    if (attributes == nullptr) {
        return 0;
    }
    attributes->qp_type = identifier->public_id.qp_type;
    if (!is_passive) {
        return get_errno(rdma_create_qp(&identifier->public_id, pd, attributes));
    }
    identifier->endpoint_qp_attributes = std::make_unique<ibv_qp_init_attr>(*attributes);
    identifier->public_id.pd = pd;
    return 0;
}

} // namespace

extern "C" {

int rdma_create_ep(rdma_cm_id** id, rdma_addrinfo* res, ibv_pd* pd, ibv_qp_init_attr* qp_init_attr) {
    return run_entry_with_errno("rdma_create_ep", [&] {
        if (id == nullptr || res == nullptr) {
            return EINVAL;
        }
        Identifier* identifier = nullptr;
        const auto port_space = static_cast<rdma_port_space>(res->ai_port_space);
        const auto qp_type = static_cast<ibv_qp_type>(res->ai_qp_type);
        int error = make_identifier(nullptr, nullptr, port_space, qp_type, &identifier);
        if (error != 0) {
            return error;
        }
        const bool is_passive = (res->ai_flags & rai_passive) != 0;
        error =
            is_passive ? bind_endpoint(&identifier->public_id, *res) : resolve_endpoint(&identifier->public_id, *res);
        error = error != 0 ? error : add_queue_pair(identifier, is_passive, pd, qp_init_attr);
        if (error != 0) {
            rdma_destroy_id(&identifier->public_id);
            return error;
        }
        if (res->ai_connect != nullptr) {
            identifier->connect_private_data.assign(static_cast<const char*>(res->ai_connect), res->ai_connect_len);
        }
        *id = &identifier->public_id;
        return 0;
    });
}

void rdma_destroy_ep(rdma_cm_id* id) {
    if (get_identifier(id) == nullptr) {
        return;
    }
    rdma_destroy_qp(id);
    rdma_destroy_srq(id);
    rdma_destroy_id(id);
}

int rdma_get_request(rdma_cm_id* listen, rdma_cm_id** id) {
    return run_entry_with_errno("rdma_get_request", [&] {
        Identifier* const listener = get_identifier(listen);
        if (listener == nullptr || !listener->is_synchronous) {
            return EINVAL;
        }
        if (listen->event != nullptr) {
            rdma_ack_cm_event(listen->event);
            listen->event = nullptr;
        }
        rdma_cm_event* event = nullptr;
        if (rdma_get_cm_event(listen->channel, &event) != 0) {
            return errno;
        }
        int error =
            event->status != 0 ? std::abs(event->status) : (event->event == RDMA_CM_EVENT_CONNECT_REQUEST ? 0 : EINVAL);
        if (error == 0 && listener->endpoint_qp_attributes != nullptr) {
            // Pass a copy, because rdma_create_qp changes the attributes, and the next request needs them unchanged.
            ibv_qp_init_attr attributes = *listener->endpoint_qp_attributes;
            error = get_errno(rdma_create_qp(event->id, listen->pd, &attributes));
            if (error != 0) {
                rdma_reject(event->id, nullptr, 0);
            }
        }
        if (error != 0) {
            // Leave the event in listen->event, where the program can read the reason. The next call acknowledges it.
            listen->event = event;
            return error;
        }
        *id = event->id;
        (*id)->event = event;
        return 0;
    });
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
