// The shared memory between a requester and its responder: rings of requests, of responses and of payload.

#include "ibverbs/link.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "ibverbs/grants.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::size_t payload_ring_bytes = 1U << 20;
constexpr std::size_t payload_alignment = 64;
static_assert(payload_ring_bytes >= 2 * max_chunk_bytes);

using AtomicU32 = std::atomic<std::uint32_t>;
static_assert(AtomicU32::is_always_lock_free && sizeof(AtomicU32) == 4);

// Wake the peer by one byte on the socket. Return false if the peer is gone. A full socket buffer is no failure,
// because the unread bytes wake the peer.
bool send_wake_byte(int socket) {
    const char wake_byte = 0;
    ssize_t sent_bytes = 0;
    do {
        sent_bytes = send(socket, &wake_byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent_bytes < 0 && errno == EINTR);
    return sent_bytes == 1 || errno == EAGAIN || errno == EWOULDBLOCK;
}

// Return whether `count` is at least `target`. The counts wrap around at 2^32.
bool has_reached(std::uint32_t count, std::uint32_t target) {
    return static_cast<std::int32_t>(count - target) >= 0;
}

// Copy a message out of shared memory exactly once. The empty asm statement keeps the compiler from reading the shared
// memory again later, when the peer may have changed it.
template <typename Message> Message read_once(const Message& shared_message) {
    Message copy;
    std::memcpy(&copy, &shared_message, sizeof copy);
    asm volatile("" : : "r"(&copy) : "memory");
    return copy;
}

} // namespace

// The layout of the shared memory in front of the payload ring. Fields of different writers are on different cache
// lines to avoid false sharing.
struct Link::ControlBlock {
    // Written by the requester.
    alignas(64) AtomicU32 request_count{0};
    alignas(64) AtomicU32 awaited_response_count{0}; // the sleeping requester waits for this number of responses
    AtomicU32 is_requester_asleep{0};
    AtomicU32 has_ended{0}; // the requester has called mark_ended
    // Written by the responder.
    alignas(64) AtomicU32 response_count{0};
    alignas(64) AtomicU32 is_responder_asleep{0};
    alignas(64) wire::Request requests[slot_count];
    alignas(64) wire::Response responses[slot_count];
    GrantTable grants;
};

namespace {

// This number of bytes is reserved for the control block. The payload ring follows.
constexpr std::size_t control_bytes = 4 * 4096;
constexpr std::size_t shared_memory_bytes = control_bytes + payload_ring_bytes;

} // namespace

Link::Link(std::unique_ptr<BounceBuffer> memory, std::unique_ptr<Pipe> pipe)
    : memory_(std::move(memory)), pipe_(std::move(pipe)),
      control_(reinterpret_cast<ControlBlock*>(memory_->data_at(0))) {
    static_assert(sizeof(ControlBlock) <= control_bytes && payload_offset == control_bytes);
}

GrantTable& Link::grants() const {
    return control_->grants;
}

std::unique_ptr<BounceBuffer> Link::make_memory() {
    auto memory = BounceBuffer::make(shared_memory_bytes);
    if (memory != nullptr) {
        new (memory->data_at(0)) ControlBlock;
    }
    return memory;
}

std::unique_ptr<Link> Link::make() {
    auto memory = make_memory();
    auto pipe = memory == nullptr ? nullptr : Pipe::make();
    if (pipe == nullptr) {
        return nullptr;
    }
    return std::unique_ptr<Link>(new Link(std::move(memory), std::move(pipe)));
}

std::unique_ptr<Link> Link::adopt(std::vector<Fd> fds) {
    auto memory = BounceBuffer::adopt(std::move(fds.at(0)), shared_memory_bytes);
    auto pipe = memory == nullptr ? nullptr : Pipe::adopt(std::move(fds.at(1)));
    return pipe == nullptr ? nullptr : std::unique_ptr<Link>(new Link(std::move(memory), std::move(pipe)));
}

BounceBuffer* Link::get_private_buffer() {
    if (private_buffer_ == nullptr) {
        private_buffer_ = BounceBuffer::make(max_chunk_bytes);
    }
    return private_buffer_.get();
}

std::optional<std::uint32_t> Link::reserve(std::size_t size_bytes) {
    if (reserved_bytes_ == released_bytes_) {
        // Start again at the beginning of the ring. While few requests are in flight, they use the same memory again
        // and again, which stays in the cache.
        reserved_bytes_ = released_bytes_ = 0;
    }
    // A request without payload reserves space too, so that an empty ring means that no request is in flight.
    const std::size_t aligned_bytes =
        (std::max<std::size_t>(size_bytes, 1) + payload_alignment - 1) / payload_alignment * payload_alignment;
    // A payload that does not fit at the end of the ring is placed at the start.
    const std::size_t ring_position = reserved_bytes_ % payload_ring_bytes;
    const std::uint64_t begin = ring_position + aligned_bytes > payload_ring_bytes
                                    ? reserved_bytes_ + payload_ring_bytes - ring_position
                                    : reserved_bytes_;
    if (begin + aligned_bytes - released_bytes_ > payload_ring_bytes) {
        return std::nullopt;
    }
    reserved_bytes_ = begin + aligned_bytes;
    return static_cast<std::uint32_t>(control_bytes + begin % payload_ring_bytes);
}

void Link::release_up_to(std::uint64_t mark) {
    released_bytes_ = mark;
}

void Link::put_request(std::uint32_t request_number, const wire::Request& request) {
    control_->requests[request_number % slot_count] = request;
}

// No wake-up is lost. To publish, a side stores its count and then loads the peer's sleep flag. To go to sleep, a side
// stores its sleep flag and then loads the peer's count. All four accesses are sequentially consistent. So either the
// sleeping side sees the new count, or the publishing side sees the flag and sends a wake-up.

void Link::store_request_count(std::uint32_t published_count) {
    control_->request_count = published_count;
}

bool Link::publish_requests(std::uint32_t published_count, int socket) {
    store_request_count(published_count);
    return control_->is_responder_asleep == 0 || control_->is_responder_asleep.exchange(0) == 0 ||
           send_wake_byte(socket);
}

std::uint32_t Link::response_count() const {
    return control_->response_count.load(std::memory_order_acquire);
}

wire::Response Link::read_response(std::uint32_t request_number) const {
    return read_once(control_->responses[request_number % slot_count]);
}

void Link::mark_ended() {
    control_->has_ended = 1;
    pipe_->drain();
}

bool Link::has_ended() const {
    return control_->has_ended.load(std::memory_order_acquire) != 0;
}

bool Link::request_wake_at(std::uint32_t awaited_count) {
    control_->awaited_response_count = awaited_count;
    control_->is_requester_asleep = 1;
    if (!has_reached(control_->response_count, awaited_count)) {
        return true;
    }
    control_->is_requester_asleep = 0;
    return false;
}

std::uint32_t Link::request_count() const {
    return control_->request_count.load(std::memory_order_acquire);
}

wire::Request Link::read_request(std::uint32_t request_number) const {
    return read_once(control_->requests[request_number % slot_count]);
}

bool Link::is_payload_in_bounds(const wire::Request& request) {
    if ((request.flags & wire::flag_piped) != 0) {
        return true;
    }
    return request.payload_offset >= control_bytes && request.payload_offset <= shared_memory_bytes &&
           request.chunk_bytes <= shared_memory_bytes - request.payload_offset;
}

void Link::put_response(std::uint32_t request_number, const wire::Response& response) {
    control_->responses[request_number % slot_count] = response;
}

bool Link::store_response_count(std::uint32_t published_count) {
    control_->response_count = published_count;
    return control_->is_requester_asleep != 0 && has_reached(published_count, control_->awaited_response_count) &&
           control_->is_requester_asleep.exchange(0) != 0;
}

void Link::publish_responses(std::uint32_t published_count, int socket) {
    if (store_response_count(published_count)) {
        // A failure is ignored, because the responder notices a dead requester when it waits for the next request.
        send_wake_byte(socket);
    }
}

bool Link::consume_wakes(int socket) {
    char wake_bytes[64];
    const ssize_t received_bytes = recv(socket, wake_bytes, sizeof wake_bytes, MSG_DONTWAIT);
    return received_bytes > 0 || (received_bytes < 0 && (errno == EAGAIN || errno == EINTR));
}

bool Link::wait_for_request(std::uint32_t served_count, int socket) {
    if (spin_until([&] { return request_count() != served_count; })) {
        return true;
    }
    while (request_wake_after(served_count)) {
        char wake_bytes[64];
        const ssize_t received_bytes = recv(socket, wake_bytes, sizeof wake_bytes, 0);
        if (received_bytes == 0 || (received_bytes < 0 && errno != EINTR)) {
            return false;
        }
        if (request_count() != served_count) {
            break;
        }
    }
    return true;
}

bool Link::request_wake_after(std::uint32_t served_count) {
    control_->is_responder_asleep = 1;
    if (control_->request_count == served_count) {
        return true;
    }
    control_->is_responder_asleep = 0;
    return false;
}

} // namespace gdrkit::twin::verbs
