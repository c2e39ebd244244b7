// Serves consecutive spliced writes into one region as a batch: state, permission and key are checked once, one call
// copies all of them, and their responses are published together.
#include <array>

#include "ibverbs/queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::size_t max_batch_requests = 32;
// Limit of one batch, so that the requester soon learns of the first writes.
constexpr std::uint64_t max_batch_bytes = 64U << 10;

bool is_whole_piped_write(const wire::Request& request) {
    return wire::well_formed(request) && request.opcode == wire::Opcode::write && request.flags == wire::flag_piped &&
           request.chunk_bytes == request.message_bytes;
}

} // namespace

// Return the number of served requests; 0 if the next request must go through serve_request, which also finds errors;
// nullopt if the connection ends.
std::optional<std::uint32_t> QueuePair::serve_write_batch(Connection* connection, Link* link,
                                                          std::uint32_t first_number, std::uint32_t end,
                                                          const IncomingMessage& incoming) {
    if (end - first_number < 2 || incoming.active) {
        return 0;
    }
    wire::Request first{};
    std::array<iovec, max_batch_requests> parts;
    std::uint64_t bytes = 0;
    std::uint32_t count = 0;
    std::shared_ptr<Region> region;
    for (; count < max_batch_requests && bytes < max_batch_bytes && first_number + count != end; ++count) {
        const wire::Request request = link->request(first_number + count);
        if (!is_whole_piped_write(request)) {
            break;
        }
        if (count == 0) {
            first = request;
            region = find_by_rkey(request.rkey, domain_, IBV_ACCESS_REMOTE_WRITE, request.remote_address,
                                  request.message_bytes);
        }
        if (region == nullptr || request.rkey != first.rkey ||
            !region->covers(request.remote_address, request.message_bytes)) {
            break;
        }
        parts[count] = {reinterpret_cast<void*>(request.remote_address), request.chunk_bytes};
        bytes += request.chunk_bytes;
    }
    if (count < 2 || !may_serve(*connection) || !permits(IBV_ACCESS_REMOTE_WRITE) || !region->mapped()) {
        return 0;
    }
    std::size_t succeeded = 0;
    const RegionError error = region->read_from(std::span(parts).first(count), &link->pipe(), &succeeded);
    for (std::size_t index = succeeded; index < count; ++index) {
        bytes -= parts[index].iov_len;
    }
    Traffic::Direction& served = context_->device->traffic.served;
    served.requests += succeeded;
    served.write_bytes += bytes;
    const auto served_count = static_cast<std::uint32_t>(succeeded);
    for (std::uint32_t index = 0; index < served_count; ++index) {
        link->put_response(first_number + index, wire::make_response(wire::Status::done));
    }
    if (served_count > 0) {
        link->publish_responses(first_number + served_count, connection->socket.get());
    }
    if (error == RegionError::none) {
        return served_count;
    }
    // The payload of the next write was removed from the pipe, or the requester drained it and waits for no response.
    if (error != RegionError::lost) {
        link->put_response(first_number + served_count, fail_request(error, *connection));
        link->publish_responses(first_number + served_count + 1, connection->socket.get());
    }
    return std::nullopt;
}

} // namespace gdrkit::twin::verbs
