// Checks received datagram frames, makes the names of the datagram sockets, and makes the network header (GRH) that
// precedes a received payload.

#include "ibverbs/datagram_frame.hpp"

#include <arpa/inet.h>
#include <endian.h>
#include <netinet/in.h>
#include <netinet/ip.h>

#include <cstdio>
#include <cstring>

namespace gdrkit::twin::verbs {
namespace {

constexpr std::uint8_t roce_v1_next_header = 0x1b; // value of ibv_grh::next_hdr: a base transport header (BTH) follows
// The sizes of the parts of a RoCE packet after the network header, except the payload: UDP header (RoCE v2 only), base
// transport header (BTH), datagram extended transport header (DETH), immediate data, and invariant CRC.
constexpr std::size_t udp_header_bytes = 8, base_header_bytes = 12, datagram_header_bytes = 8, immediate_bytes = 4,
                      checksum_bytes = 4;
static_assert(sizeof(iphdr) == 20);

std::string format_hex(const ibv_gid& gid) {
    std::string hex_text;
    char digits[3];
    for (const std::uint8_t byte : gid.raw) {
        std::snprintf(digits, sizeof digits, "%02x", byte);
        hex_text += digits;
    }
    return hex_text;
}

// Return the number of bytes between the network header and the end of the packet. The payload is padded to 4 bytes.
std::uint16_t count_transport_bytes(const DatagramHeader& header) {
    const std::size_t used_immediate_bytes = (header.flags & datagram_has_immediate) != 0 ? immediate_bytes : 0;
    const std::size_t padded_payload_bytes = (header.payload_bytes + 3) / 4 * 4;
    const std::size_t used_udp_bytes = header.is_roce_v2 != 0 ? udp_header_bytes : 0;
    return static_cast<std::uint16_t>(used_udp_bytes + base_header_bytes + datagram_header_bytes +
                                      used_immediate_bytes + padded_payload_bytes + checksum_bytes);
}

// Return the checksum of an IPv4 header whose checksum field is 0 (RFC 1071).
std::uint16_t compute_ipv4_checksum(const iphdr& header) {
    std::uint16_t header_words[sizeof header / 2];
    std::memcpy(header_words, &header, sizeof header);
    std::uint32_t word_sum = 0;
    for (const std::uint16_t word : header_words) {
        word_sum += word;
    }
    // Add the carries, in the upper 16 bits, to the lower 16 bits. The addition can carry once more.
    word_sum = (word_sum & 0xffff) + (word_sum >> 16);
    word_sum = (word_sum & 0xffff) + (word_sum >> 16);
    return static_cast<std::uint16_t>(~word_sum);
}

// Make the IPv4 header of a RoCE v2 packet between two GIDs that are IPv4 addresses.
iphdr make_ipv4_header(const DatagramHeader& header) {
    iphdr ipv4{};
    ipv4.version = 4;
    ipv4.ihl = sizeof ipv4 / 4;
    ipv4.tos = header.traffic_class;
    ipv4.tot_len = htons(static_cast<std::uint16_t>(sizeof ipv4 + count_transport_bytes(header)));
    ipv4.frag_off = htons(IP_DF);
    ipv4.ttl = header.hop_limit;
    ipv4.protocol = IPPROTO_UDP;
    // The last 4 of the 16 bytes of such a GID are the IPv4 address.
    std::memcpy(&ipv4.saddr, header.source_gid.raw + 12, sizeof ipv4.saddr);
    std::memcpy(&ipv4.daddr, header.destination_gid.raw + 12, sizeof ipv4.daddr);
    ipv4.check = compute_ipv4_checksum(ipv4);
    return ipv4;
}

} // namespace

bool is_same_gid(const ibv_gid& first, const ibv_gid& second) {
    return std::memcmp(&first, &second, sizeof first) == 0;
}

bool is_ipv4_gid(const ibv_gid& gid) {
    constexpr std::uint8_t ipv4_mapped_prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return std::memcmp(gid.raw, ipv4_mapped_prefix, sizeof ipv4_mapped_prefix) == 0;
}

// Return whether the GID is an IPv6 multicast address (ff00::/8) or an IPv4 one (224.0.0.0/4).
bool is_multicast_gid(const ibv_gid& gid) {
    return gid.raw[0] == 0xff || (is_ipv4_gid(gid) && (gid.raw[12] & 0xf0) == 0xe0);
}

// The limits of the fields: a flow label has 20 bits, and a service level has 4.
bool is_well_formed(const DatagramHeader& header, std::size_t frame_bytes) {
    const bool is_to_group = is_multicast_gid(header.destination_gid);
    return header.magic == datagram_magic && header.version == datagram_version &&
           header.payload_bytes <= max_datagram_bytes && frame_bytes == sizeof header + header.payload_bytes &&
           header.source_qpn < multicast_qpn && header.destination_qpn <= multicast_qpn &&
           is_to_group == (header.destination_qpn == multicast_qpn) && header.flow_label <= 0xfffff &&
           (header.flags & ~(datagram_has_immediate | datagram_is_solicited)) == 0 && header.service_level < 16 &&
           header.is_roce_v2 <= 1;
}

std::string make_datagram_socket_name(const ibv_gid& gid, std::uint32_t qp_num) {
    char qp_num_text[16];
    std::snprintf(qp_num_text, sizeof qp_num_text, ".%06x", qp_num & 0xffffffU);
    return "ud." + format_hex(gid) + qp_num_text;
}

std::string make_multicast_socket_name(const ibv_gid& group, unsigned member_index) {
    return "mc." + format_hex(group) + "." + std::to_string(member_index);
}

std::array<std::byte, grh_bytes> make_network_header(const DatagramHeader& header) {
    std::array<std::byte, grh_bytes> bytes{};
    if (header.is_roce_v2 != 0 && is_ipv4_gid(header.source_gid) && is_ipv4_gid(header.destination_gid)) {
        // The IPv4 header is in the last 20 of the 40 bytes.
        const iphdr ipv4 = make_ipv4_header(header);
        std::memcpy(bytes.data() + grh_bytes - sizeof ipv4, &ipv4, sizeof ipv4);
        return bytes;
    }
    ibv_grh grh{};
    grh.version_tclass_flow =
        htobe32(6U << 28 | static_cast<std::uint32_t>(header.traffic_class) << 20 | header.flow_label);
    grh.paylen = htobe16(count_transport_bytes(header));
    grh.next_hdr = header.is_roce_v2 != 0 ? static_cast<std::uint8_t>(IPPROTO_UDP) : roce_v1_next_header;
    grh.hop_limit = header.hop_limit;
    grh.sgid = header.source_gid;
    grh.dgid = header.destination_gid;
    std::memcpy(bytes.data(), &grh, sizeof grh);
    return bytes;
}

} // namespace gdrkit::twin::verbs
