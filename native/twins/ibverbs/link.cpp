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
static_assert(payload_bytes >= 2 * chunk_bytes_most);

using Count = std::atomic<std::uint32_t>;
static_assert(Count::is_always_lock_free && sizeof(Count) == 4);

// A byte on the socket. Where there is no room for one, enough of them wait to be read.
bool wake(int socket) {
    const char one = 0;
    ssize_t sent = 0;
    do {
        sent = send(socket, &one, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent == 1 || errno == EAGAIN || errno == EWOULDBLOCK;
}

bool reached(std::uint32_t count, std::uint32_t wanted) {
    return static_cast<std::int32_t>(count - wanted) >= 0;
}

// One copy that the compiler may not repeat: the other side can write meanwhile.
template <typename Message> Message copy_out(const Message& shared) {
    Message own;
    std::memcpy(&own, &shared, sizeof own);
    asm volatile("" : : "r"(&own) : "memory");
    return own;
}

} // namespace

// Lines apart, so that the sides do not take them from one another more often than needed.
struct Link::Shared {
    // The requester writes these.
    alignas(64) Count submitted{0};
    alignas(64) Count requester_wants{0};
    Count requester_sleeps{0};
    Count ended{0};
    // The responder writes these.
    alignas(64) Count answered{0};
    alignas(64) Count responder_sleeps{0};
    alignas(64) wire::Request requests[slot_count];
    alignas(64) wire::Response responses[slot_count];
};

namespace {

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t shared_bytes = 4 * page_bytes;
constexpr std::size_t whole_bytes = shared_bytes + payload_bytes;

} // namespace

Link::Link(std::unique_ptr<Bounce> memory, std::unique_ptr<Pipe> pipe)
    : memory_(std::move(memory)), pipe_(std::move(pipe)), shared_(reinterpret_cast<Shared*>(memory_->at(0))) {
    static_assert(sizeof(Shared) <= shared_bytes);
}

std::unique_ptr<Link> Link::make() {
    auto memory = Bounce::make(whole_bytes);
    auto pipe = memory == nullptr ? nullptr : Pipe::make();
    if (pipe == nullptr) {
        return nullptr;
    }
    new (memory->at(0)) Shared;
    return std::unique_ptr<Link>(new Link(std::move(memory), std::move(pipe)));
}

std::unique_ptr<Link> Link::adopt(std::vector<Fd> fds) {
    auto memory = Bounce::adopt(std::move(fds.at(0)), whole_bytes);
    auto pipe = memory == nullptr ? nullptr : Pipe::adopt(std::move(fds.at(1)));
    return pipe == nullptr ? nullptr : std::unique_ptr<Link>(new Link(std::move(memory), std::move(pipe)));
}

Bounce* Link::own_memory() {
    if (own_ == nullptr) {
        own_ = Bounce::make(chunk_bytes_most);
    }
    return own_.get();
}

std::optional<std::uint32_t> Link::reserve(std::size_t size) {
    if (reserved_ == released_) {
        // From the begin again: few requests at a time then use the same memory, which a cache holds.
        reserved_ = released_ = 0;
    }
    // A request without bytes takes a place too, so that nothing is in flight when nothing is taken.
    const std::size_t whole =
        (std::max<std::size_t>(size, 1) + payload_alignment - 1) / payload_alignment * payload_alignment;
    const std::size_t at = reserved_ % payload_bytes;
    const std::uint64_t begin = at + whole > payload_bytes ? reserved_ + payload_bytes - at : reserved_;
    if (begin + whole - released_ > payload_bytes) {
        return std::nullopt;
    }
    reserved_ = begin + whole;
    return static_cast<std::uint32_t>(shared_bytes + begin % payload_bytes);
}

void Link::release(std::uint64_t mark) {
    released_ = mark;
}

void Link::put(std::uint32_t number, const wire::Request& request) {
    shared_->requests[number % slot_count] = request;
}

// Each of the sides first says what it did or wants, then looks at what the other said, in one order for both: so
// either the sleeper sees the work or the worker sees the sleeper.

bool Link::publish_requests(std::uint32_t count, int socket) {
    shared_->submitted = count;
    return shared_->responder_sleeps == 0 || shared_->responder_sleeps.exchange(0) == 0 || wake(socket);
}

std::uint32_t Link::answered() const {
    return shared_->answered.load(std::memory_order_acquire);
}

wire::Response Link::response(std::uint32_t number) const {
    return copy_out(shared_->responses[number % slot_count]);
}

void Link::end() {
    shared_->ended = 1;
    pipe_->take_back();
}

bool Link::ended() const {
    return shared_->ended.load(std::memory_order_acquire) != 0;
}

bool Link::ask_wake_at(std::uint32_t count) {
    shared_->requester_wants = count;
    shared_->requester_sleeps = 1;
    if (!reached(shared_->answered, count)) {
        return true;
    }
    shared_->requester_sleeps = 0;
    return false;
}

std::uint32_t Link::submitted() const {
    return shared_->submitted.load(std::memory_order_acquire);
}

wire::Request Link::request(std::uint32_t number) const {
    return copy_out(shared_->requests[number % slot_count]);
}

bool Link::holds(const wire::Request& request) {
    if ((request.flags & wire::flag_piped) != 0) {
        return true;
    }
    return request.payload_at >= shared_bytes && request.payload_at <= whole_bytes &&
           request.chunk_bytes <= whole_bytes - request.payload_at;
}

void Link::answer(std::uint32_t number, const wire::Response& response) {
    shared_->responses[number % slot_count] = response;
}

void Link::publish_answers(std::uint32_t count, int socket) {
    shared_->answered = count;
    if (shared_->requester_sleeps != 0 && reached(count, shared_->requester_wants) &&
        shared_->requester_sleeps.exchange(0) != 0) {
        // One that is gone is noticed at the next look for requests.
        wake(socket);
    }
}

bool Link::ask_wake_after(std::uint32_t count) {
    shared_->responder_sleeps = 1;
    if (shared_->submitted == count) {
        return true;
    }
    shared_->responder_sleeps = 0;
    return false;
}

} // namespace gdrkit::twin::verbs
