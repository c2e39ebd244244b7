// The IP addresses of this machine's NICs on the TCP fabric, as GDRKIT_TWINS_FABRIC selects them.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace gdrkit::twin {

// An IPv6 address, or an IPv4 address mapped to IPv6: the bytes of the RoCE GID of a NIC with this address.
using FabricAddress = std::array<std::uint8_t, 16>;

// A socket address for IPv4 or IPv6, whichever the FabricAddress is.
struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t size_bytes = 0;

    SocketAddress(const FabricAddress& address, std::uint16_t port);
    sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
    [[nodiscard]] int family() const { return storage.ss_family; }
    [[nodiscard]] std::uint16_t port() const;
};

// Return this machine's addresses in the networks of a text like tcp://10.1.0.0/16,10.2.0.7: one for each NIC. Return
// nullopt if the text is malformed, or if this machine has no address in one of the networks.
std::optional<std::vector<FabricAddress>> find_fabric_addresses(std::string_view text);

} // namespace gdrkit::twin
