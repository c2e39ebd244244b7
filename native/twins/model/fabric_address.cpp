// Finds the addresses of this machine that GDRKIT_TWINS_FABRIC selects.

#include "model/fabric_address.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>

#include "model/sockets.hpp"

namespace gdrkit::twin {
namespace {

// The first bytes of an IPv4 address that is mapped to IPv6 (::ffff:0:0/96).
constexpr std::array<std::uint8_t, 12> mapped_prefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr unsigned address_bits = 128, ipv4_bits = 32;
constexpr std::size_t max_fabric_address_count = 16;

bool is_ipv4(const FabricAddress& address) {
    return std::equal(mapped_prefix.begin(), mapped_prefix.end(), address.begin());
}

FabricAddress map_ipv4(const void* ipv4) {
    FabricAddress address{};
    std::copy(mapped_prefix.begin(), mapped_prefix.end(), address.begin());
    std::memcpy(address.data() + mapped_prefix.size(), ipv4, 4);
    return address;
}

// An IP network: all addresses whose first `prefix_bits` bits are equal to the first bits of `address`.
struct Network {
    FabricAddress address;
    unsigned prefix_bits;

    [[nodiscard]] bool contains(const FabricAddress& other) const {
        for (unsigned bit = 0; bit < prefix_bits; ++bit) {
            const unsigned mask = 0x80U >> (bit % 8);
            if ((address[bit / 8] & mask) != (other[bit / 8] & mask)) {
                return false;
            }
        }
        return true;
    }
};

// Parse an address, optionally with a slash and a prefix length.
std::optional<Network> parse_network(std::string_view text) {
    const std::size_t slash = text.find('/');
    const std::string address_text(text.substr(0, slash));
    Network network{{}, address_bits};
    in_addr ipv4{};
    unsigned family_bits = address_bits;
    if (inet_pton(AF_INET, address_text.c_str(), &ipv4) == 1) {
        network.address = map_ipv4(&ipv4);
        family_bits = ipv4_bits;
    } else if (inet_pton(AF_INET6, address_text.c_str(), network.address.data()) != 1) {
        return std::nullopt;
    }
    if (slash != std::string_view::npos) {
        const std::string_view prefix = text.substr(slash + 1);
        unsigned prefix_length = 0;
        const auto [end, error] = std::from_chars(prefix.data(), prefix.data() + prefix.size(), prefix_length);
        if (error != std::errc{} || end != prefix.data() + prefix.size() || prefix_length > family_bits) {
            return std::nullopt;
        }
        network.prefix_bits = address_bits - family_bits + prefix_length;
    }
    return network;
}

// Return the addresses of all network interfaces except link-local addresses.
std::vector<FabricAddress> list_local_addresses() {
    std::vector<FabricAddress> addresses;
    ifaddrs* list = nullptr;
    if (getifaddrs(&list) != 0) {
        return addresses;
    }
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
        if (entry->ifa_addr == nullptr) {
            continue;
        }
        if (entry->ifa_addr->sa_family == AF_INET) {
            addresses.push_back(map_ipv4(&reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr));
        } else if (entry->ifa_addr->sa_family == AF_INET6) {
            const in6_addr& ipv6 = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr;
            if (!IN6_IS_ADDR_LINKLOCAL(&ipv6)) {
                std::memcpy(addresses.emplace_back().data(), &ipv6, sizeof ipv6);
            }
        }
    }
    freeifaddrs(list);
    return addresses;
}

// Return whether this machine has the address. The test is a bind, because getifaddrs lists only one address of the
// loopback interface, which has all addresses of 127.0.0.0/8.
bool is_local(const FabricAddress& address) {
    SocketAddress socket_address(address, 0);
    const Fd socket(::socket(socket_address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    return socket && bind(socket.get(), socket_address.get(), socket_address.size_bytes) == 0;
}

} // namespace

SocketAddress::SocketAddress(const FabricAddress& address, std::uint16_t port) {
    if (is_ipv4(address)) {
        sockaddr_in ipv4{};
        ipv4.sin_family = AF_INET;
        ipv4.sin_port = htons(port);
        std::memcpy(&ipv4.sin_addr, address.data() + mapped_prefix.size(), sizeof ipv4.sin_addr);
        std::memcpy(&storage, &ipv4, size_bytes = sizeof ipv4);
    } else {
        sockaddr_in6 ipv6{};
        ipv6.sin6_family = AF_INET6;
        ipv6.sin6_port = htons(port);
        std::memcpy(&ipv6.sin6_addr, address.data(), address.size());
        std::memcpy(&storage, &ipv6, size_bytes = sizeof ipv6);
    }
}

std::uint16_t SocketAddress::port() const {
    // sockaddr_in and sockaddr_in6 have the port at the same offset.
    return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::optional<std::vector<FabricAddress>> find_fabric_addresses(std::string_view text) {
    constexpr std::string_view scheme = "tcp://";
    if (!text.starts_with(scheme)) {
        return std::nullopt;
    }
    text.remove_prefix(scheme.size());
    std::vector<FabricAddress> addresses;
    const auto add_address = [&](const FabricAddress& address) {
        if (std::find(addresses.begin(), addresses.end(), address) == addresses.end() &&
            addresses.size() < max_fabric_address_count) {
            addresses.push_back(address);
        }
    };
    for (;;) {
        const std::size_t end = text.find(',');
        const auto network = parse_network(text.substr(0, end));
        if (!network) {
            return std::nullopt;
        }
        const std::size_t count_before = addresses.size();
        if (network->prefix_bits == address_bits && is_local(network->address)) {
            add_address(network->address);
        }
        for (const FabricAddress& address : list_local_addresses()) {
            if (network->contains(address)) {
                add_address(address);
            }
        }
        if (addresses.size() == count_before) {
            return std::nullopt;
        }
        if (end == std::string_view::npos) {
            return addresses;
        }
        text.remove_prefix(end + 1);
    }
}

} // namespace gdrkit::twin
