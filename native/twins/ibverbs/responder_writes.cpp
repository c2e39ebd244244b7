// Writes that lie in the pipe one behind the other, into one region: served together, with one look at the state, the
// permission and the key, one call that copies them, and one announcement of their answers.
#include <array>

#include "ibverbs/queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::size_t together_most = 32;
// What is copied before the requester hears of any of it.
constexpr std::uint64_t together_bytes = 64U << 10;

bool is_whole_piped_write(const wire::Request& request) {
    return wire::well_formed(request) && request.opcode == wire::Opcode::write && request.flags == wire::flag_piped &&
           request.chunk_bytes == request.message_bytes;
}

} // namespace

// How many were served; 0: the next request is for serve_one, which also says what is wrong with it; nullopt: the
// connection ends.
std::optional<std::uint32_t> QueuePair::serve_writes(Connection* own, Link* link, std::uint32_t number,
                                                     std::uint32_t end, const Arriving& arriving) {
    if (end - number < 2 || arriving.active) {
        return 0;
    }
    wire::Request first{};
    std::array<iovec, together_most> parts;
    std::uint64_t bytes = 0;
    std::uint32_t count = 0;
    std::shared_ptr<Region> region;
    for (; count < together_most && bytes < together_bytes && number + count != end; ++count) {
        const wire::Request request = link->request(number + count);
        if (!is_whole_piped_write(request)) {
            break;
        }
        if (count == 0) {
            first = request;
            region = find_remote(request.rkey, domain_, IBV_ACCESS_REMOTE_WRITE, request.remote_address,
                                 request.message_bytes);
        }
        if (region == nullptr || request.rkey != first.rkey ||
            !region->covers(request.remote_address, request.message_bytes)) {
            break;
        }
        parts[count] = {reinterpret_cast<void*>(request.remote_address), request.chunk_bytes};
        bytes += request.chunk_bytes;
    }
    if (count < 2 || !still_serving(*own) || !permits(IBV_ACCESS_REMOTE_WRITE) || !region->mapped()) {
        return 0;
    }
    std::size_t whole = 0;
    const RegionError error = region->take(std::span(parts).first(count), &link->pipe(), &whole);
    for (std::size_t index = whole; index < count; ++index) {
        bytes -= parts[index].iov_len;
    }
    Traffic::Direction& served = context_->device->traffic.served;
    served.requests += whole;
    served.write_bytes += bytes;
    const auto done = static_cast<std::uint32_t>(whole);
    for (std::uint32_t index = 0; index < done; ++index) {
        link->answer(number + index, wire::response_of(wire::Answer::done));
    }
    if (done > 0) {
        link->publish_answers(number + done, own->socket.get());
    }
    if (error == RegionError::none) {
        return done;
    }
    // The bytes of the next one are out of the pipe, or were taken back; then nobody waits for an answer.
    if (error != RegionError::lost) {
        link->answer(number + done, refuse(error, *own));
        link->publish_answers(number + done + 1, own->socket.get());
    }
    return std::nullopt;
}

} // namespace gdrkit::twin::verbs
