// Checks the messages that this process receives from other connection managers.

#include "rdmacm/wire.hpp"

#include <algorithm>

#include "rdmacm/types.hpp"

namespace gdrkit::twin::rdmacm::wire {

std::size_t get_private_field_bytes(Type type) {
    switch (type) {
    case Type::request:
        return request_private_bytes;
    case Type::reply:
        return reply_private_bytes;
    case Type::reject:
        return reject_private_bytes;
    case Type::datagram_request:
        return datagram_request_private_bytes;
    case Type::datagram_reply:
        return datagram_reply_private_bytes;
    default:
        return 0;
    }
}

bool is_valid(const Message& message) {
    const auto type = static_cast<std::uint16_t>(message.type);
    const bool is_known_message = message.magic == magic && message.version == version &&
                                  type >= static_cast<std::uint16_t>(Type::request) &&
                                  type <= static_cast<std::uint16_t>(Type::datagram_reply);
    const bool has_known_port_space = message.port_space == RDMA_PS_TCP || message.port_space == RDMA_PS_UDP ||
                                      message.port_space == RDMA_PS_IB || message.port_space == RDMA_PS_IPOIB;
    return is_known_message && has_known_port_space && (message.family == AF_INET || message.family == AF_INET6) &&
           message.qp_num <= 0xffffff && message.psn <= 0xffffff && message.retry_count < 8 &&
           message.rnr_retry_count < 8 && message.flow_control <= 1 && message.srq <= 1 &&
           message.private_bytes <= get_private_field_bytes(message.type) &&
           std::all_of(message.private_data.begin() + message.private_bytes, message.private_data.end(),
                       [](std::uint8_t byte) { return byte == 0; }) &&
           message.reserved == std::array<std::uint8_t, 2>{};
}

} // namespace gdrkit::twin::rdmacm::wire
