// A datagram queue pair sends each datagram as one frame (a DatagramHeader and the payload) to the socket of the
// receiver. This file has the layout of a frame, the names of the sockets, and the network header in front of the
// payload in the memory of the receiver. Any process of the user can send to these sockets, so the receiver copies each
// frame once and checks the copy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ibverbs/abi.hpp"

namespace gdrkit::twin::verbs {

// Queue pair number of datagrams to a multicast group.
inline constexpr std::uint32_t multicast_qpn = 0xffffff;
// Largest payload of a datagram: the path MTU of the twin's ports (IBV_MTU_4096).
inline constexpr std::size_t max_datagram_bytes = 4096;
// Size of the network header (the global routing header, GRH) in front of the payload in the memory of the receiver.
inline constexpr std::size_t grh_bytes = sizeof(ibv_grh);
static_assert(grh_bytes == 40);
// Largest number of queue pairs of all processes of a domain (an emulated machine) in one multicast group. Soft-RoCE
// (rxe) has the same limit.
inline constexpr unsigned max_multicast_members = 56;

// The header of a frame. The payload follows the header.
struct DatagramHeader {
    std::uint32_t magic;
    std::uint32_t version;
    ibv_gid source_gid;
    ibv_gid destination_gid;
    std::uint32_t source_qpn;
    std::uint32_t destination_qpn;
    std::uint32_t qkey;
    std::uint32_t immediate_data; // valid if `flags` has datagram_has_immediate
    std::uint32_t payload_bytes;
    std::uint32_t flow_label;
    std::uint32_t flags;
    std::uint8_t traffic_class;
    std::uint8_t hop_limit;
    std::uint8_t service_level;
    std::uint8_t is_roce_v2; // 1 if the source's GID has the type RoCE v2; 0 for RoCE v1
};
static_assert(sizeof(DatagramHeader) == 72);

inline constexpr std::uint32_t datagram_magic = 0x47444455; // "UDDG" in memory
inline constexpr std::uint32_t datagram_version = 1;
// Bits of DatagramHeader::flags.
inline constexpr std::uint32_t datagram_has_immediate = 1;
inline constexpr std::uint32_t datagram_is_solicited = 2;

// Return whether a twin can have sent a frame of `frame_bytes` bytes with this header.
bool is_well_formed(const DatagramHeader& header, std::size_t frame_bytes);

// Return whether a GID is an IPv4 address in its IPv6 form (::ffff:a.b.c.d).
bool is_ipv4_gid(const ibv_gid& gid);
// Return whether a GID is a multicast address.
bool is_multicast_gid(const ibv_gid& gid);
bool is_same_gid(const ibv_gid& first, const ibv_gid& second);

// Return the name of the socket at which a queue pair receives its datagrams, or at which a member of a multicast group
// receives the datagrams of the group.
std::string make_datagram_socket_name(const ibv_gid& gid, std::uint32_t qp_num);
std::string make_multicast_socket_name(const ibv_gid& group, unsigned member_index);

// Return the 40 bytes that the receiver finds in front of the payload: for RoCE v1 the global routing header; for RoCE
// v2 the IPv6 header or, if both GIDs are IPv4 addresses, 20 zero bytes and the IPv4 header.
std::array<std::byte, grh_bytes> make_network_header(const DatagramHeader& header);

} // namespace gdrkit::twin::verbs
