// Socket addresses: comparison, classification, and conversion to a GID and to a part of a socket name.
#pragma once

#include <string>
#include <vector>

#include "rdmacm/types.hpp"

namespace gdrkit::twin::rdmacm {

// An IPv4 or IPv6 address without a port. An IPv4 address is stored as an IPv4-mapped IPv6 address. If a RoCE device
// has this address, its GID consists of the same bytes.
struct IpAddress {
    int family = AF_INET; // AF_INET or AF_INET6
    ibv_gid bytes{};
    std::uint32_t scope_id = 0;

    [[nodiscard]] bool is_any() const; // 0.0.0.0 or ::
    [[nodiscard]] bool is_loopback() const;
    [[nodiscard]] bool is_multicast() const;
    bool operator==(const IpAddress& other) const;
};

// Return the length of an AF_INET or AF_INET6 address in bytes, or 0 for another family and for nullptr.
socklen_t get_address_length(const sockaddr* address);
// Return the address without its port. An address whose family is not AF_INET6 is read as an AF_INET address.
IpAddress get_ip(const sockaddr* address);
std::uint16_t get_port(const sockaddr* address); // host byte order
// Store an AF_INET or AF_INET6 address. The port is in host byte order.
void store_address(sockaddr_storage* storage, const IpAddress& address, std::uint16_t port);

IpAddress make_loopback_address(int family);
// Return whether an interface of this host has the address. Every loopback address counts too.
bool is_host_address(const IpAddress& address);
// Return the addresses of the interfaces of this host, of both families.
std::vector<IpAddress> list_host_addresses();
// Store the source address of the packets that this host sends to `destination`. Return 0 or an errno, for
// example ENETUNREACH if there is no route.
int choose_source_by_route(const IpAddress& destination, IpAddress* source);

bool is_same_gid(const ibv_gid& left, const ibv_gid& right);
std::string format_gid(const ibv_gid& gid); // 32 hexadecimal digits

} // namespace gdrkit::twin::rdmacm
