// The link between queue pairs on two machines: requests, responses and payload over a TCP socket.

#include "ibverbs/tcp_link.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include <system_error>

#include "model/thread.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Send a message and its payload. `has_more` tells the kernel that another message follows at once.
bool send_message(int socket, const void* message, std::size_t message_bytes, const std::byte* payload,
                  std::size_t payload_bytes, bool has_more) {
    iovec message_parts[2] = {{const_cast<void*>(message), message_bytes},
                              {const_cast<std::byte*>(payload), payload_bytes}};
    msghdr header{};
    header.msg_iov = message_parts;
    header.msg_iovlen = 2;
    ssize_t sent_bytes_or_error = 0;
    do {
        sent_bytes_or_error = sendmsg(socket, &header, MSG_NOSIGNAL | (has_more ? MSG_MORE : 0));
    } while (sent_bytes_or_error < 0 && errno == EINTR);
    if (sent_bytes_or_error < 0) {
        return false;
    }
    // sendmsg may send only a part of a large message. Then send the rest.
    const auto sent_bytes = static_cast<std::size_t>(sent_bytes_or_error);
    if (sent_bytes < message_bytes) {
        return send_all(socket, static_cast<const char*>(message) + sent_bytes, message_bytes - sent_bytes) &&
               send_all(socket, payload, payload_bytes);
    }
    return send_all(socket, payload + (sent_bytes - message_bytes), message_bytes + payload_bytes - sent_bytes);
}

// Return the number of bytes that follow a response on the socket.
std::size_t count_payload_bytes(const wire::Response& response, const wire::Request& request) {
    return response.status == wire::Status::done && request.opcode == wire::Opcode::read ? response.payload_bytes : 0;
}

} // namespace

std::unique_ptr<Link> TcpLink::make_requester(int socket) {
    auto memory = make_memory();
    if (memory == nullptr) {
        return nullptr;
    }
    auto link = std::unique_ptr<TcpLink>(new TcpLink(std::move(memory)));
    link->socket_ = Fd(fcntl(socket, F_DUPFD_CLOEXEC, 0));
    link->wake_eventfd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!link->socket_ || !link->wake_eventfd_) {
        return nullptr;
    }
    // The handshake has set a receive timeout. Remove it, because an idle connection receives no responses.
    const timeval no_timeout{0, 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &no_timeout, sizeof no_timeout);
    try {
        link->receiver_thread_ = start_signal_blocking_thread([receiver = link.get()] { receiver->run_receiver(); });
    } catch (const std::system_error&) {
        return nullptr;
    }
    return link;
}

std::unique_ptr<Link> TcpLink::make_responder() {
    auto memory = make_memory();
    return memory == nullptr ? nullptr : std::unique_ptr<Link>(new TcpLink(std::move(memory)));
}

TcpLink::~TcpLink() {
    mark_ended();
}

void TcpLink::mark_ended() {
    if (receiver_thread_.joinable()) {
        shutdown(socket_.get(), SHUT_RDWR);
        receiver_thread_.join();
    }
}

bool TcpLink::publish_requests(std::uint32_t published_count, int socket) {
    store_request_count(published_count);
    while (sent_count_ != published_count) {
        const wire::Request request = read_request(sent_count_++);
        const std::size_t payload_bytes = wire::carries_payload(request.opcode) ? request.chunk_bytes : 0;
        if (!send_message(socket, &request, sizeof request, memory().data_at(request.payload_offset), payload_bytes,
                          sent_count_ != published_count)) {
            return false;
        }
    }
    return true;
}

int TcpLink::wake_fd(int) const {
    return wake_eventfd_.get();
}

bool TcpLink::consume_wakes(int) {
    eventfd_t wake_count = 0;
    eventfd_read(wake_eventfd_.get(), &wake_count);
    return !is_peer_gone_;
}

void TcpLink::run_receiver() {
    for (std::uint32_t request_number = 0; receive_response(request_number);) {
        if (store_response_count(++request_number)) {
            eventfd_write(wake_eventfd_.get(), 1);
        }
    }
    is_peer_gone_ = true;
    eventfd_write(wake_eventfd_.get(), 1);
}

// Receive the response to the request `request_number`, the next one without a response. Return false at the end of the
// connection, or if the response is malformed or belongs to no request.
bool TcpLink::receive_response(std::uint32_t request_number) {
    wire::Response response{};
    if (!recv_all(socket_.get(), &response, sizeof response) || request_count() - request_number - 1 >= slot_count) {
        return false;
    }
    const wire::Request request = read_request(request_number);
    if (!wire::is_well_formed(response, request) ||
        !recv_all(socket_.get(), memory().data_at(request.payload_offset), count_payload_bytes(response, request))) {
        return false;
    }
    put_response(request_number, response);
    return true;
}

bool TcpLink::wait_for_request(std::uint32_t served_count, int socket) {
    wire::Request request{};
    if (!recv_all(socket, &request, sizeof request) || !wire::is_well_formed(request) ||
        (request.flags & wire::flag_piped) != 0) {
        return false;
    }
    // Only one request is served at a time, so its payload is always at the start of the ring.
    request.payload_offset = payload_offset;
    if (wire::carries_payload(request.opcode) &&
        !recv_all(socket, memory().data_at(payload_offset), request.chunk_bytes)) {
        return false;
    }
    put_request(served_count, request);
    store_request_count(served_count + 1);
    return true;
}

void TcpLink::publish_responses(std::uint32_t published_count, int socket) {
    store_response_count(published_count);
    for (; sent_count_ != published_count; ++sent_count_) {
        const wire::Response response = read_response(sent_count_);
        // A failure is ignored, because the responder notices a dead requester when it waits for the next request.
        send_message(socket, &response, sizeof response, memory().data_at(payload_offset),
                     count_payload_bytes(response, read_request(sent_count_)), false);
    }
}

} // namespace gdrkit::twin::verbs
