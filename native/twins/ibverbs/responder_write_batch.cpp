// The responder serves consecutive writes into one region as a batch if their payload is in the pipe (link.hpp). It
// checks the state, permission and key once, copies all payloads with one call, and publishes the responses together.
#include <array>

#include "ibverbs/connected_queue_pair.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::size_t max_batch_requests = 32;
// A batch is limited to this size, so that the requester gets the responses to the first writes soon.
constexpr std::uint64_t max_batch_bytes = 64U << 10;

// Return whether the request is a complete write whose payload is in the pipe.
bool is_complete_piped_write(const wire::Request& request) {
    return wire::is_well_formed(request) && request.opcode == wire::Opcode::write &&
           request.flags == wire::flag_piped && request.chunk_bytes == request.message_bytes;
}

} // namespace

// Serve the requests from `first_request_number` on, but not `end_request_number`, as long as they are complete writes
// into one region and their payload is in the pipe. Return the number of served requests. Return 0 if serve_request,
// which detects all errors, must serve the next request. Return nullopt if the connection ends.
std::optional<std::uint32_t> ConnectedQueuePair::serve_write_batch(Connection* connection, Link* link,
                                                                   std::uint32_t first_request_number,
                                                                   std::uint32_t end_request_number,
                                                                   const IncomingMessage& incoming) {
    if (end_request_number - first_request_number < 2 || incoming.is_active || !is_reliable() ||
        xrc_domain_ != nullptr) {
        return 0;
    }
    wire::Request first_request{};
    std::array<iovec, max_batch_requests> destinations;
    std::uint64_t batch_bytes = 0;
    std::uint32_t request_count = 0;
    std::shared_ptr<Region> region;
    for (; request_count < max_batch_requests && batch_bytes < max_batch_bytes &&
           first_request_number + request_count != end_request_number;
         ++request_count) {
        const wire::Request request = link->read_request(first_request_number + request_count);
        if (!is_complete_piped_write(request)) {
            break;
        }
        if (request_count == 0) {
            first_request = request;
            std::uint64_t address = request.remote_address;
            region =
                find_by_rkey(request.rkey, domain_, qp_num_, IBV_ACCESS_REMOTE_WRITE, &address, request.message_bytes);
            // If a memory window has this rkey, its bounds differ from the region's bounds. Then serve_request serves
            // the writes one by one.
            if (region != nullptr && region->rkey != request.rkey) {
                region.reset();
            }
        }
        if (region == nullptr || request.rkey != first_request.rkey ||
            !region->covers(request.remote_address, request.message_bytes)) {
            break;
        }
        destinations[request_count] = {reinterpret_cast<void*>(request.remote_address), request.chunk_bytes};
        batch_bytes += request.chunk_bytes;
    }
    if (request_count < 2 || !may_serve(*connection) || !permits(IBV_ACCESS_REMOTE_WRITE) || !region->is_mapped()) {
        return 0;
    }
    std::size_t succeeded_count = 0;
    const RegionError error =
        region->read_from_pipe(std::span(destinations).first(request_count), &link->pipe(), &succeeded_count);
    Traffic::Direction& served_traffic = context_->device->traffic.served;
    served_traffic.requests += succeeded_count;
    // Add each write separately: the counter computes the number of packets, and no packet has bytes of two writes.
    for (std::size_t index = 0; index < succeeded_count; ++index) {
        served_traffic.write_bytes += destinations[index].iov_len;
    }
    if (error == RegionError::none) {
        grant(region.get(), first_request.rkey, *connection);
    }
    const auto served_count = static_cast<std::uint32_t>(succeeded_count);
    for (std::uint32_t index = 0; index < served_count; ++index) {
        link->put_response(first_request_number + index, wire::make_response(wire::Status::done));
    }
    if (served_count > 0) {
        link->publish_responses(first_request_number + served_count, connection->socket.get());
    }
    if (error == RegionError::none) {
        return served_count;
    }
    // The read has removed the payload of the failed write from the pipe, so the write cannot be tried again and the
    // connection ends. RegionError::lost means that the requester itself has drained the pipe and does not wait for a
    // response.
    if (error != RegionError::lost) {
        link->put_response(first_request_number + served_count, fail_request(error, *connection));
        link->publish_responses(first_request_number + served_count + 1, connection->socket.get());
    }
    return std::nullopt;
}

} // namespace gdrkit::twin::verbs
