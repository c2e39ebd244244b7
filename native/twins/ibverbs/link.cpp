// Implements the shared memory between a requester and its responder.

#include "ibverbs/link.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

namespace gdrkit::twin::verbs {
namespace {

constexpr std::size_t payload_bytes = 1U << 20;
constexpr std::size_t payload_alignment = 64;
static_assert(payload_bytes >= 2 * max_chunk_bytes);

using Count = std::atomic<std::uint32_t>;
static_assert(Count::is_always_lock_free && sizeof(Count) == 4);

// Wake the peer by one byte on the socket. If the socket's buffer is full, enough bytes wait to be read already.
bool send_wake_byte(int socket) {
    const char one = 0;
    ssize_t sent = 0;
    do {
        sent = send(socket, &one, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent == 1 || errno == EAGAIN || errno == EWOULDBLOCK;
}

bool reached(std::uint32_t count, std::uint32_t target) {
    return static_cast<std::int32_t>(count - target) >= 0;
}

// Copy a message out of shared memory exactly once: the compiler must not read it again, because the peer can write to
// it meanwhile.
template <typename Message> Message read_once(const Message& shared) {
    Message own;
    std::memcpy(&own, &shared, sizeof own);
    asm volatile("" : : "r"(&own) : "memory");
    return own;
}

} // namespace

// The layout of the control part. Fields of different writers are on different cache lines to avoid false sharing.
struct Link::Shared {
    // Written by the requester.
    alignas(64) Count submitted{0};
    alignas(64) Count requester_wants{0};
    Count requester_sleeps{0};
    Count ended{0};
    // Written by the responder.
    alignas(64) Count responded{0};
    alignas(64) Count responder_sleeps{0};
    alignas(64) wire::Request requests[slot_count];
    alignas(64) wire::Response responses[slot_count];
};

namespace {

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t shared_bytes = 4 * page_bytes;
constexpr std::size_t whole_bytes = shared_bytes + payload_bytes;

} // namespace

Link::Link(std::unique_ptr<BounceBuffer> memory, std::unique_ptr<Pipe> pipe)
    : memory_(std::move(memory)), pipe_(std::move(pipe)), shared_(reinterpret_cast<Shared*>(memory_->at(0))) {
    static_assert(sizeof(Shared) <= shared_bytes);
}

std::unique_ptr<Link> Link::make() {
    auto memory = BounceBuffer::make(whole_bytes);
    auto pipe = memory == nullptr ? nullptr : Pipe::make();
    if (pipe == nullptr) {
        return nullptr;
    }
    new (memory->at(0)) Shared;
    return std::unique_ptr<Link>(new Link(std::move(memory), std::move(pipe)));
}

std::unique_ptr<Link> Link::adopt(std::vector<Fd> fds) {
    auto memory = BounceBuffer::adopt(std::move(fds.at(0)), whole_bytes);
    auto pipe = memory == nullptr ? nullptr : Pipe::adopt(std::move(fds.at(1)));
    return pipe == nullptr ? nullptr : std::unique_ptr<Link>(new Link(std::move(memory), std::move(pipe)));
}

BounceBuffer* Link::private_buffer() {
    if (private_buffer_ == nullptr) {
        private_buffer_ = BounceBuffer::make(max_chunk_bytes);
    }
    return private_buffer_.get();
}

std::optional<std::uint32_t> Link::reserve(std::size_t size) {
    if (reserved_ == released_) {
        // Restart at the beginning: then few requests at a time reuse the same memory, which stays in the cache.
        reserved_ = released_ = 0;
    }
    // A request without payload reserves space too, so that an empty ring means that no request is in flight.
    const std::size_t aligned_size =
        (std::max<std::size_t>(size, 1) + payload_alignment - 1) / payload_alignment * payload_alignment;
    const std::size_t at = reserved_ % payload_bytes;
    const std::uint64_t begin = at + aligned_size > payload_bytes ? reserved_ + payload_bytes - at : reserved_;
    if (begin + aligned_size - released_ > payload_bytes) {
        return std::nullopt;
    }
    reserved_ = begin + aligned_size;
    return static_cast<std::uint32_t>(shared_bytes + begin % payload_bytes);
}

void Link::release(std::uint64_t mark) {
    released_ = mark;
}

void Link::put_request(std::uint32_t number, const wire::Request& request) {
    shared_->requests[number % slot_count] = request;
}

// Each side first stores its own state, then loads the peer's, with sequential consistency. So either the sleeper sees
// the work, or the worker sees the sleeper.

bool Link::publish_requests(std::uint32_t count, int socket) {
    shared_->submitted = count;
    return shared_->responder_sleeps == 0 || shared_->responder_sleeps.exchange(0) == 0 || send_wake_byte(socket);
}

std::uint32_t Link::responded() const {
    return shared_->responded.load(std::memory_order_acquire);
}

wire::Response Link::response(std::uint32_t number) const {
    return read_once(shared_->responses[number % slot_count]);
}

void Link::mark_ended() {
    shared_->ended = 1;
    pipe_->drain();
}

bool Link::ended() const {
    return shared_->ended.load(std::memory_order_acquire) != 0;
}

bool Link::request_wake_at(std::uint32_t count) {
    shared_->requester_wants = count;
    shared_->requester_sleeps = 1;
    if (!reached(shared_->responded, count)) {
        return true;
    }
    shared_->requester_sleeps = 0;
    return false;
}

std::uint32_t Link::submitted() const {
    return shared_->submitted.load(std::memory_order_acquire);
}

wire::Request Link::request(std::uint32_t number) const {
    return read_once(shared_->requests[number % slot_count]);
}

bool Link::payload_in_bounds(const wire::Request& request) {
    if ((request.flags & wire::flag_piped) != 0) {
        return true;
    }
    return request.payload_offset >= shared_bytes && request.payload_offset <= whole_bytes &&
           request.chunk_bytes <= whole_bytes - request.payload_offset;
}

void Link::put_response(std::uint32_t number, const wire::Response& response) {
    shared_->responses[number % slot_count] = response;
}

void Link::publish_responses(std::uint32_t count, int socket) {
    shared_->responded = count;
    if (shared_->requester_sleeps != 0 && reached(count, shared_->requester_wants) &&
        shared_->requester_sleeps.exchange(0) != 0) {
        // A failure is ignored: the responder notices a dead requester when it waits for the next request.
        send_wake_byte(socket);
    }
}

bool Link::request_wake_after(std::uint32_t count) {
    shared_->responder_sleeps = 1;
    if (shared_->submitted == count) {
        return true;
    }
    shared_->responder_sleeps = 0;
    return false;
}

} // namespace gdrkit::twin::verbs
