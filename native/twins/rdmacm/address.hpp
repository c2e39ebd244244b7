// Socket addresses: comparison, classification, and their form as a GID and as a part of a socket name.
#pragma once

#include <string>
#include <vector>

#include "rdmacm/types.hpp"

namespace gdrkit::twin::rdmacm {

// An IPv4 or IPv6 address without a port. An IPv4 address is stored as an IPv4-mapped IPv6 address. A RoCE device with
// this address has the same bytes as its GID.
struct IpAddress {
    int family = AF_INET; // AF_INET or AF_INET6
    ibv_gid bytes{};
    std::uint32_t scope_id = 0;

    [[nodiscard]] bool is_any() const;
    [[nodiscard]] bool is_loopback() const;
    [[nodiscard]] bool is_multicast() const;
    bool operator==(const IpAddress& other) const;
};

// Return the length of an AF_INET or AF_INET6 address in bytes, or 0 if it is neither.
socklen_t get_address_length(const sockaddr* address);
IpAddress get_ip(const sockaddr* address);
std::uint16_t get_port(const sockaddr* address); // host byte order
void store_address(sockaddr_storage* storage, const IpAddress& address, std::uint16_t port);

IpAddress make_loopback_address(int family);
// Return whether an interface of this host has the address. The loopback networks are local too.
bool is_host_address(const IpAddress& address);
// Return the addresses of the interfaces of this host, of both families.
std::vector<IpAddress> list_host_addresses();
// Store the source address of the packets that this host sends to `destination`. Return 0 or an errno of the routing
// (ENETUNREACH ...).
int choose_source_address(const IpAddress& destination, IpAddress* source);

bool is_same_gid(const ibv_gid& left, const ibv_gid& right);
std::string format_gid(const ibv_gid& gid); // 32 hexadecimal digits

} // namespace gdrkit::twin::rdmacm
