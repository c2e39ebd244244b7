// Checks the messages between queue pairs, and makes the names of the sockets on which queue pairs listen.

#include "ibverbs/wire.hpp"

#include <cstdio>

#include "ibverbs/device.hpp"

namespace gdrkit::twin::verbs::wire {

std::string make_socket_name(const ibv_gid& gid, std::uint32_t qp_num) {
    char byte_text[3];
    std::string name = "qp.";
    for (const std::uint8_t byte : gid.raw) {
        std::snprintf(byte_text, sizeof byte_text, "%02x", byte);
        name += byte_text;
    }
    char qp_num_text[16];
    std::snprintf(qp_num_text, sizeof qp_num_text, ".%06x", qp_num & 0xffffffU);
    return name + qp_num_text;
}

Response make_response(Status status) {
    Response response{};
    response.magic = magic;
    response.status = status;
    return response;
}

bool is_well_formed(const ConnectRequest& connect_request) {
    return connect_request.magic == magic && connect_request.version == version &&
           connect_request.source_qpn <= 0xffffff && connect_request.destination_qpn <= 0xffffff &&
           connect_request.psn <= 0xffffff;
}

bool is_well_formed(const Request& request) {
    // Only a send can invalidate a key, which then takes the place of immediate data. Only a write with payload can use
    // the pipe.
    if (request.magic != magic || request.opcode > Opcode::fetch_and_add ||
        (request.flags & ~(flag_immediate | flag_solicited | flag_piped | flag_invalidate)) != 0 ||
        ((request.flags & flag_invalidate) != 0 &&
         (request.opcode != Opcode::send || (request.flags & flag_immediate) != 0)) ||
        ((request.flags & flag_piped) != 0 && (request.opcode != Opcode::write || request.chunk_bytes == 0))) {
        return false;
    }
    if (request.opcode == Opcode::compare_and_swap || request.opcode == Opcode::fetch_and_add) {
        return request.message_bytes == 8 && request.chunk_bytes == 8 && request.chunk_offset_bytes == 0 &&
               (request.flags & flag_immediate) == 0;
    }
    const bool is_within_limits = request.chunk_bytes <= max_chunk_bytes &&
                                  request.message_bytes <= max_message_bytes &&
                                  request.chunk_offset_bytes <= request.message_bytes &&
                                  request.chunk_bytes <= request.message_bytes - request.chunk_offset_bytes;
    // Only an empty message has an empty chunk, and it has no other chunk.
    return is_within_limits && (request.chunk_bytes > 0 || request.message_bytes == 0) &&
           (request.opcode != Opcode::read || (request.flags & flag_immediate) == 0);
}

bool is_well_formed(const Response& response, const Request& request) {
    const bool has_payload = request.opcode == Opcode::read && response.status == Status::done;
    return response.magic == magic && response.status <= Status::operation_failed && response.rnr_timer < 32 &&
           response.payload_bytes == (has_payload ? request.chunk_bytes : 0);
}

} // namespace gdrkit::twin::verbs::wire
