// Claims ports in the domain, by sockets whose names the kernel keeps unique and frees when a process dies.

#include "rdmacm/ports.hpp"

#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <thread>

#include "model/config.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

constexpr unsigned first_unprivileged_port = 1024;
// The default of /proc/sys/net/ipv4/ip_local_port_range, from which the kernel chooses ports.
constexpr unsigned first_ephemeral_port = 32768, ephemeral_port_count = 28232;
constexpr int max_port_attempts = 256;

// The names of sockets have three forms. "cmport.PORT.ADDRESS" claims a port, "cmlock.PORT" locks a port during a
// claim, and a listener accepts requests at "cm.GID.PORT.ADDRESS". PORT is a letter for the port space and the port in
// hexadecimal. ADDRESS is a hash of the address, or a wildcard: any IPv4 address, any IPv6 address, or any address of
// both families. The parts are short, because a name has at most 50 bytes after the prefix of the domain.
constexpr std::string_view any_ipv4 = "any4", any_ipv6 = "any6", any_of_both = "any";

// Return the part of a name for the port.
std::string make_port_text(rdma_port_space port_space, std::uint16_t port) {
    const char letter =
        port_space == RDMA_PS_TCP ? 't' : (port_space == RDMA_PS_UDP ? 'u' : (port_space == RDMA_PS_IB ? 'b' : 'i'));
    char port_text[16];
    std::snprintf(port_text, sizeof port_text, "%c%04x", letter, static_cast<unsigned>(port));
    return port_text;
}

// Return the FNV-1a hash of an address. If two addresses had the same hash, a port could be claimed for only one of
// them. No request would reach a wrong listener, because a listener compares the address in the request with its own.
std::string hash_address(const ibv_gid& address) {
    std::uint32_t hash = 0x811c9dc5U; // the offset basis; the number below is the prime of FNV-1a
    for (const std::uint8_t byte : address.raw) {
        hash = (hash ^ byte) * 0x01000193U;
    }
    char hash_text[16];
    std::snprintf(hash_text, sizeof hash_text, "%08x", hash);
    return hash_text;
}

// Return the part of a name for the address: a hash, or a wildcard if the identifier is bound to all addresses.
std::string make_address_text(const Identifier& id, const IpAddress& address) {
    if (!address.is_any()) {
        return hash_address(address.bytes);
    }
    if (address.family == AF_INET) {
        return std::string(any_ipv4);
    }
    return std::string(id.ipv6_only ? any_ipv6 : any_of_both);
}

std::string make_claim_name(rdma_port_space port_space, std::uint16_t port, std::string_view address_text) {
    return "cmport." + make_port_text(port_space, port) + "." + std::string(address_text);
}

// Return all addresses of the given families that an identifier on this host can be bound to, each as the last part of
// a name.
std::vector<std::string> list_specific_address_texts(bool include_ipv4, bool include_ipv6) {
    std::set<std::string> address_texts;
    for (const IpAddress& address : list_host_addresses()) {
        if ((address.family == AF_INET && include_ipv4) || (address.family == AF_INET6 && include_ipv6)) {
            address_texts.insert(hash_address(address.bytes));
        }
    }
    int error = 0;
    for (const auto& device : get_cm_devices(&error)) {
        for (const ibv_gid_entry& entry : device->gids) {
            const bool is_ipv4 = IN6_IS_ADDR_V4MAPPED(reinterpret_cast<const in6_addr*>(entry.gid.raw));
            if (is_ipv4 ? include_ipv4 : include_ipv6) {
                address_texts.insert(hash_address(entry.gid));
            }
        }
    }
    return {address_texts.begin(), address_texts.end()};
}

// Return the addresses (as last parts of names) whose claims conflict with a claim of `address`.
std::vector<std::string> list_conflicting_address_texts(const IpAddress& address, std::string_view own_address_text) {
    const bool covers_all_ipv4 = own_address_text == any_ipv4 || own_address_text == any_of_both;
    const bool covers_all_ipv6 = own_address_text == any_ipv6 || own_address_text == any_of_both;
    std::vector<std::string> conflicting_texts;
    if (address.is_any()) {
        conflicting_texts = list_specific_address_texts(covers_all_ipv4, covers_all_ipv6);
    }
    if (own_address_text != any_ipv4 && (covers_all_ipv4 || address.family == AF_INET)) {
        conflicting_texts.emplace_back(any_ipv4);
    }
    if (own_address_text != any_ipv6 && (covers_all_ipv6 || address.family == AF_INET6)) {
        conflicting_texts.emplace_back(any_ipv6);
    }
    if (own_address_text != any_of_both) {
        conflicting_texts.emplace_back(any_of_both);
    }
    return conflicting_texts;
}

// Lock a port against claims by other processes, because two concurrent claims would see each other's temporary names.
// Return the socket that is the lock. If another process holds the lock for a second (it may be stopped), return no
// socket; the caller then claims without the lock.
Fd lock_port(rdma_port_space port_space, std::uint16_t port) {
    const std::string lock_name = "cmlock." + make_port_text(port_space, port);
    for (int attempt = 0; attempt < 1000; ++attempt) {
        const int fd = listen_on(lock_name);
        if (fd >= 0) {
            return Fd(fd);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return Fd();
}

int claim_one_port(Identifier* id, const IpAddress& address, std::uint16_t port) {
    const Fd port_lock = lock_port(id->public_id.ps, port);
    const std::string own_address_text = make_address_text(*id, address);
    Fd claim_socket(listen_on(make_claim_name(id->public_id.ps, port, own_address_text)));
    if (!claim_socket) {
        return EADDRINUSE;
    }
    // Take each conflicting name for a moment. If this fails, another identifier has claimed it.
    for (const std::string& conflicting_text : list_conflicting_address_texts(address, own_address_text)) {
        if (!Fd(listen_on(make_claim_name(id->public_id.ps, port, conflicting_text)))) {
            return EADDRINUSE;
        }
    }
    id->port_claim.name_sockets.push_back(std::move(claim_socket));
    return 0;
}

} // namespace

int claim_port(Identifier* id, const IpAddress& address, std::uint16_t port) {
    if (port != 0) {
        if (port < first_unprivileged_port && geteuid() != 0) {
            return EACCES;
        }
        // Identifiers with RDMA_OPTION_ID_REUSEADDR share a port until one of them listens.
        const int error = id->reuse_address ? 0 : claim_one_port(id, address, port);
        id->port_claim.port = error == 0 ? port : id->port_claim.port;
        return error;
    }
    for (int attempt = 0; attempt < max_port_attempts; ++attempt) {
        const auto chosen_port = static_cast<std::uint16_t>(first_ephemeral_port + random_u64() % ephemeral_port_count);
        if (claim_one_port(id, address, chosen_port) == 0) {
            id->port_claim.port = chosen_port;
            return 0;
        }
    }
    return EADDRNOTAVAIL;
}

int claim_exclusively(Identifier* id) {
    if (!id->port_claim.name_sockets.empty()) {
        return 0;
    }
    return claim_one_port(id, get_ip(&id->public_id.route.addr.src_addr), id->port_claim.port);
}

std::vector<std::string> list_listener_names(const Identifier& id) {
    const IpAddress address = get_ip(&id.public_id.route.addr.src_addr);
    std::set<std::string> gid_texts;
    int error = 0;
    if (address.is_any()) {
        for (const auto& device : get_cm_devices(&error)) {
            for (const ibv_gid_entry& entry : device->gids) {
                gid_texts.insert(format_gid(entry.gid));
            }
        }
    } else {
        gid_texts.insert(format_gid(id.local_gid->gid()));
    }
    std::vector<std::string> names;
    for (const std::string& gid_text : gid_texts) {
        names.push_back("cm." + gid_text + "." + make_port_text(id.public_id.ps, id.port_claim.port) + "." +
                        make_address_text(id, address));
    }
    return names;
}

std::vector<std::string> list_names_to_try(rdma_port_space port_space, const ibv_gid& gid, const IpAddress& address,
                                           std::uint16_t port) {
    const std::string name_prefix = "cm." + format_gid(gid) + "." + make_port_text(port_space, port) + ".";
    const std::string_view any_of_family = address.family == AF_INET ? any_ipv4 : any_ipv6;
    return {name_prefix + hash_address(address.bytes), name_prefix + std::string(any_of_family),
            name_prefix + std::string(any_of_both)};
}

} // namespace gdrkit::twin::rdmacm
