// Implements how stream rsockets listen, accept and connect, and how they handle connection events.

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "rdmacm/address.hpp"
#include "rdmacm/rsocket_stream.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

constexpr std::uint32_t greeting_magic = 0x52534b31; // "1KSR" in memory
constexpr std::uint16_t greeting_version = 2;
constexpr int stream_resolve_timeout_ms = 2000;

} // namespace

StreamSocket::Greeting StreamSocket::make_greeting() const {
    return {greeting_magic, greeting_version, static_cast<std::uint16_t>(std::min(options_.io_mapping_count, 0xffff))};
}

bool StreamSocket::read_greeting(const rdma_conn_param& parameters) {
    Greeting greeting{};
    if (parameters.private_data == nullptr || parameters.private_data_len < sizeof greeting) {
        return false;
    }
    std::memcpy(&greeting, parameters.private_data, sizeof greeting);
    peer_mapping_limit_ = greeting.io_mapping_count;
    return greeting.magic == greeting_magic && greeting.version == greeting_version;
}

int StreamSocket::listen(int backlog) {
    SocketLock lock(mutex_);
    if (rdma_listen(id_, backlog) != 0) {
        return errno;
    }
    stage_ = Stage::listening;
    return 0;
}

int StreamSocket::accept(std::shared_ptr<RdmaSocket>* accepted_socket) {
    SocketLock lock(mutex_);
    if (stage_ != Stage::listening) {
        return EINVAL;
    }
    for (;;) {
        rdma_cm_event* event = nullptr;
        while (rdma_get_cm_event(channel_, &event) != 0) {
            if (errno != EAGAIN || is_nonblocking(0)) {
                return errno;
            }
            lock.unlock();
            pollfd readable{channel_->fd, POLLIN, 0};
            const int error = poll(&readable, 1, -1) < 0 ? errno : 0;
            lock.lock();
            if (error != 0) {
                return error;
            }
        }
        auto new_socket = std::make_shared<StreamSocket>(address_family_);
        rdma_cm_id* const id = event->id;
        const bool is_request = event->event == RDMA_CM_EVENT_CONNECT_REQUEST;
        const bool has_valid_greeting = is_request && new_socket->read_greeting(event->param.conn);
        rdma_ack_cm_event(event);
        if (!is_request) {
            continue;
        }
        new_socket->channel_ = rdma_create_event_channel();
        if (!has_valid_greeting || new_socket->channel_ == nullptr || rdma_migrate_id(id, new_socket->channel_) != 0) {
            rdma_reject(id, nullptr, 0);
            rdma_destroy_id(id);
            continue;
        }
        fcntl(new_socket->channel_->fd, F_SETFL, O_NONBLOCK);
        new_socket->id_ = id;
        new_socket->options_ = options_;
        new_socket->status_flags_ = 0;
        new_socket->stage_ = Stage::connecting;
        const Greeting reply = new_socket->make_greeting();
        rdma_conn_param parameters{};
        parameters.private_data = &reply;
        parameters.private_data_len = sizeof reply;
        parameters.flow_control = 1;
        parameters.rnr_retry_count = 7; // without limit
        if (new_socket->create_receiving_queue_pair() != 0 || rdma_accept(id, &parameters) != 0) {
            rdma_reject(id, nullptr, 0);
            continue; // the destructor of `new_socket` destroys the identifier
        }
        *accepted_socket = new_socket;
        return 0;
    }
}

// Resolve the address and the route, and send the connection request. Return 0 or an errno.
int StreamSocket::request_connection(sockaddr* address) {
    // The twin resolves addresses and routes at once, so rdma_get_cm_event gets both events without a wait.
    rdma_cm_event* event = nullptr;
    if (rdma_resolve_addr(id_, nullptr, address, stream_resolve_timeout_ms) != 0 ||
        rdma_get_cm_event(channel_, &event) != 0) {
        return errno;
    }
    const int status = event->status;
    rdma_ack_cm_event(event);
    if (status != 0) {
        return -status;
    }
    if (rdma_resolve_route(id_, stream_resolve_timeout_ms) != 0 || rdma_get_cm_event(channel_, &event) != 0) {
        return errno;
    }
    rdma_ack_cm_event(event);
    if (const int error = create_receiving_queue_pair(); error != 0) {
        return error;
    }
    const Greeting request = make_greeting();
    rdma_conn_param parameters{};
    parameters.private_data = &request;
    parameters.private_data_len = sizeof request;
    parameters.flow_control = 1;
    parameters.retry_count = 7;
    parameters.rnr_retry_count = 7; // without limit
    stage_ = Stage::connecting;
    return rdma_connect(id_, &parameters) == 0 ? 0 : errno;
}

// Connect, and return 0 or the errno that librdmacm sets. If the socket listens or has connected before, some of these
// errno values differ from connect(2).
int StreamSocket::connect(sockaddr* address, socklen_t length) {
    SocketLock lock(mutex_);
    progress();
    switch (stage_) {
    case Stage::listening:
        return EINVAL;
    case Stage::connected:
        return 0;
    case Stage::disconnected:
    case Stage::refused:
    case Stage::failed:
        return ENOTCONN;
    case Stage::unconnected:
        if (address == nullptr || length < get_address_length(address) || get_address_length(address) == 0) {
            return EINVAL;
        }
        if (const int error = request_connection(address); error != 0) {
            end_connection(Stage::refused, error);
            return error;
        }
        if (is_nonblocking(0)) {
            return EINPROGRESS; // as on hardware, where the reply of the peer comes later
        }
        break;
    case Stage::connecting:
        break;
    }
    const int error = wait_for_connection(&lock, 0);
    return error == EAGAIN ? EINPROGRESS : error;
}

void StreamSocket::on_connection_event(const rdma_cm_event& event) {
    switch (event.event) {
    case RDMA_CM_EVENT_ESTABLISHED:
        // On the active side (connect), this event has the private data of the reply. On the passive side (accept), it
        // has none: accept() has already read the greeting from the request.
        if (stage_ == Stage::connecting) {
            const bool is_active = event.param.conn.private_data_len != 0;
            stage_ = Stage::connected;
            if (is_active && !read_greeting(event.param.conn)) {
                end_connection(Stage::failed, EPROTO);
            }
        }
        return;
    case RDMA_CM_EVENT_REJECTED:
        return end_connection(Stage::refused, ECONNREFUSED);
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
        return end_connection(Stage::refused, event.status < 0 ? -event.status : ECONNREFUSED);
    case RDMA_CM_EVENT_DISCONNECTED:
        // If the peer sent no disconnect message before, it was killed. rdma_disconnect moves the queue pair to the
        // error state, so every posted receive completes. progress() waits for these completions.
        if (stage_ == Stage::connected) {
            has_peer_left_ = true;
            rdma_disconnect(id_);
        }
        return;
    default:
        return;
    }
}

void StreamSocket::take_events() {
    rdma_cm_event* event = nullptr;
    while (stage_ != Stage::listening && rdma_get_cm_event(channel_, &event) == 0) {
        // The private data belongs to the event, so it is copied before the acknowledgement frees the event.
        const rdma_cm_event event_copy = *event;
        std::array<std::uint8_t, 256> private_data{}; // private_data_len is at most 255
        rdma_cm_event event_with_data = event_copy;
        if (event_copy.param.conn.private_data != nullptr) {
            std::memcpy(private_data.data(), event_copy.param.conn.private_data,
                        event_copy.param.conn.private_data_len);
            event_with_data.param.conn.private_data = private_data.data();
        }
        rdma_ack_cm_event(event); // acknowledge now, because rdma_destroy_id in another thread may wait for that
        on_connection_event(event_with_data);
    }
}

} // namespace gdrkit::twin::rdmacm
