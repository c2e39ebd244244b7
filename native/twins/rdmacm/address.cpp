// Implements the functions for socket addresses and queries the addresses of this host.

#include "rdmacm/address.hpp"

#include <ifaddrs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "model/sockets.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// Byte offset of an IPv4 address in its IPv4-mapped form ::ffff:a.b.c.d. The two bytes before the address are 0xff.
constexpr std::size_t ipv4_offset = 12;

} // namespace

bool IpAddress::is_any() const {
    const std::size_t first_byte = family == AF_INET ? ipv4_offset : 0;
    return std::all_of(bytes.raw + first_byte, bytes.raw + sizeof bytes.raw,
                       [](std::uint8_t byte) { return byte == 0; });
}

bool IpAddress::is_loopback() const {
    if (family == AF_INET) {
        return bytes.raw[ipv4_offset] == 127;
    }
    return std::memcmp(bytes.raw, &in6addr_loopback, sizeof bytes.raw) == 0;
}

// The multicast addresses are 224.0.0.0/4 and ff00::/8.
bool IpAddress::is_multicast() const {
    return family == AF_INET ? (bytes.raw[ipv4_offset] & 0xf0) == 0xe0 : bytes.raw[0] == 0xff;
}

bool IpAddress::operator==(const IpAddress& other) const {
    return family == other.family && is_same_gid(bytes, other.bytes);
}

socklen_t get_address_length(const sockaddr* address) {
    if (address == nullptr) {
        return 0;
    }
    return address->sa_family == AF_INET ? sizeof(sockaddr_in)
                                         : (address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : 0);
}

IpAddress get_ip(const sockaddr* address) {
    IpAddress ip;
    if (address->sa_family == AF_INET6) {
        sockaddr_in6 ipv6;
        std::memcpy(&ipv6, address, sizeof ipv6);
        ip.family = AF_INET6;
        ip.scope_id = ipv6.sin6_scope_id;
        std::memcpy(ip.bytes.raw, &ipv6.sin6_addr, sizeof ip.bytes.raw);
        return ip;
    }
    sockaddr_in ipv4;
    std::memcpy(&ipv4, address, sizeof ipv4);
    ip.bytes.raw[10] = ip.bytes.raw[11] = 0xff;
    std::memcpy(ip.bytes.raw + ipv4_offset, &ipv4.sin_addr, sizeof ipv4.sin_addr);
    return ip;
}

std::uint16_t get_port(const sockaddr* address) {
    sockaddr_in ipv4; // the port is at the same offset in both families
    static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
    std::memcpy(&ipv4, address, sizeof ipv4);
    return ntohs(ipv4.sin_port);
}

void store_address(sockaddr_storage* storage, const IpAddress& address, std::uint16_t port) {
    std::memset(storage, 0, sizeof *storage);
    if (address.family == AF_INET6) {
        sockaddr_in6 ipv6{};
        ipv6.sin6_family = AF_INET6;
        ipv6.sin6_port = htons(port);
        ipv6.sin6_scope_id = address.scope_id;
        std::memcpy(&ipv6.sin6_addr, address.bytes.raw, sizeof ipv6.sin6_addr);
        std::memcpy(storage, &ipv6, sizeof ipv6);
        return;
    }
    sockaddr_in ipv4{};
    ipv4.sin_family = AF_INET;
    ipv4.sin_port = htons(port);
    std::memcpy(&ipv4.sin_addr, address.bytes.raw + ipv4_offset, sizeof ipv4.sin_addr);
    std::memcpy(storage, &ipv4, sizeof ipv4);
}

std::vector<IpAddress> list_host_addresses() {
    std::vector<IpAddress> addresses;
    ifaddrs* interfaces = nullptr;
    if (getifaddrs(&interfaces) != 0) {
        return addresses;
    }
    for (const ifaddrs* interface = interfaces; interface != nullptr; interface = interface->ifa_next) {
        if (get_address_length(interface->ifa_addr) != 0) {
            addresses.push_back(get_ip(interface->ifa_addr));
        }
    }
    freeifaddrs(interfaces);
    return addresses;
}

IpAddress make_loopback_address(int family) {
    sockaddr_storage storage{};
    if (family == AF_INET6) {
        sockaddr_in6 ipv6{};
        ipv6.sin6_family = AF_INET6;
        ipv6.sin6_addr = in6addr_loopback;
        std::memcpy(&storage, &ipv6, sizeof ipv6);
    } else {
        sockaddr_in ipv4{};
        ipv4.sin_family = AF_INET;
        ipv4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        std::memcpy(&storage, &ipv4, sizeof ipv4);
    }
    return get_ip(reinterpret_cast<const sockaddr*>(&storage));
}

bool is_host_address(const IpAddress& address) {
    const auto addresses = list_host_addresses();
    return address.is_loopback() || std::find(addresses.begin(), addresses.end(), address) != addresses.end();
}

int choose_source_by_route(const IpAddress& destination, IpAddress* source) {
    const Fd socket(::socket(destination.family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!socket) {
        return errno;
    }
    // connect() of a datagram socket sends no packet. It only lets the kernel choose the route, and with the route the
    // source address. The port does not matter.
    sockaddr_storage storage;
    store_address(&storage, destination, 1);
    auto* const generic_address = reinterpret_cast<sockaddr*>(&storage);
    socklen_t address_length = sizeof storage;
    if (connect(socket.get(), generic_address, get_address_length(generic_address)) != 0 ||
        getsockname(socket.get(), generic_address, &address_length) != 0) {
        return errno;
    }
    *source = get_ip(generic_address);
    return 0;
}

bool is_same_gid(const ibv_gid& left, const ibv_gid& right) {
    return std::memcmp(left.raw, right.raw, sizeof left.raw) == 0;
}

std::string format_gid(const ibv_gid& gid) {
    constexpr char digits[] = "0123456789abcdef";
    std::string hex_text;
    for (const std::uint8_t byte : gid.raw) {
        hex_text += digits[byte >> 4];
        hex_text += digits[byte & 15];
    }
    return hex_text;
}

} // namespace gdrkit::twin::rdmacm
