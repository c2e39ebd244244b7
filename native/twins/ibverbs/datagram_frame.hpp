// Datagrams move between queue pairs as frames. This file has the layout of a frame, the names of the sockets that
// receive frames, and the network header in front of the payload in the memory of the receiver. Any process of the user
// can send to these sockets, so the receiver copies each frame once and checks the copy.
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
// Size of the network header in front of the payload, in the memory of the receive request.
inline constexpr std::size_t grh_bytes = sizeof(ibv_grh);
static_assert(grh_bytes == 40);
// Largest number of queue pairs in one multicast group. All processes of a domain (an emulated machine) count together.
// Soft-RoCE (rxe) has the same limit.
inline constexpr unsigned max_multicast_members = 56;

// The first part of a frame. The payload follows it.
struct DatagramHeader {
    std::uint32_t magic;
    std::uint32_t version;
    ibv_gid source_gid;
    ibv_gid destination_gid;
    std::uint32_t source_qpn;
    std::uint32_t destination_qpn;
    std::uint32_t qkey;
    std::uint32_t immediate_data;
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
inline constexpr std::uint32_t datagram_has_immediate = 1;
inline constexpr std::uint32_t datagram_is_solicited = 2;

// Return whether a frame of `frame_bytes` bytes with this header can come from a twin.
bool is_well_formed(const DatagramHeader& header, std::size_t frame_bytes);

// Return whether a GID is an IPv4 address (::ffff:a.b.c.d), is a multicast group, or equals another GID.
bool is_ipv4_gid(const ibv_gid& gid);
bool is_multicast_gid(const ibv_gid& gid);
bool is_same_gid(const ibv_gid& first, const ibv_gid& second);

// Return the name of the socket at which a queue pair receives its datagrams, or at which a member of a multicast group
// receives the datagrams of the group.
std::string make_datagram_socket_name(const ibv_gid& gid, std::uint32_t qp_num);
std::string make_multicast_socket_name(const ibv_gid& group, unsigned member_index);

// Return the 40 bytes that the receiver finds in front of the payload: for RoCE v1 the global routing header; for RoCE
// v2 the IPv6 header, or 20 zero bytes and the IPv4 header.
std::array<std::byte, grh_bytes> make_network_header(const DatagramHeader& header);

} // namespace gdrkit::twin::verbs
