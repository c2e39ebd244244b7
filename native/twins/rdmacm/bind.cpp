// Binds connection identifiers (rdma_cm_id) to addresses and ports, and resolves addresses and routes.

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "model/config.hpp"
#include "rdmacm/connection.hpp"
#include "rdmacm/functions.hpp"
#include "rdmacm/ports.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// Bind an identifier in the state idle. The caller holds the lock of the connection manager.
int bind_identifier(Identifier* identifier, const IpAddress& address, std::uint16_t port) {
    std::optional<LocalGid> local_gid;
    if (!address.is_any()) {
        local_gid = find_local_gid(address);
        if (!local_gid) {
            // The errors are the same as in the kernel: EADDRNOTAVAIL if no interface has the address, ENODEV if an
            // interface has it but no RDMA device uses this interface.
            return is_host_address(address) ? ENODEV : EADDRNOTAVAIL;
        }
    }
    if (const int error = claim_port(identifier, address, port); error != 0) {
        return error;
    }
    if (local_gid) {
        set_local_gid(identifier, *local_gid);
    }
    set_source_address(identifier, address, identifier->port_claim.port);
    identifier->state = State::bound;
    return 0;
}

// Choose the source address for a destination. Return 0 or an errno, which an ADDR_ERROR event reports.
int choose_source_address(const Identifier& identifier, const IpAddress& destination, IpAddress* source) {
    *source = get_ip(&identifier.public_id.route.addr.src_addr);
    if (!source->is_any()) {
        return source->family == destination.family ? 0 : EINVAL;
    }
    if (!destination.is_multicast() && find_local_gid(destination)) {
        *source = destination; // the packets stay on this host
        return 0;
    }
    return choose_source_by_route(destination, source);
}

// Resolve the destination of the identifier. Return 0 or an errno, which an ADDR_ERROR event reports.
int resolve_destination(Identifier* identifier, IpAddress destination) {
    if (destination.is_any()) {
        destination = make_loopback_address(destination.family); // as the kernel does
    }
    IpAddress source;
    if (const int error = choose_source_address(*identifier, destination, &source); error != 0) {
        return error;
    }
    const auto local_gid = find_local_gid(source);
    if (!local_gid) {
        return ENODEV;
    }
    // If the destination is not on this host, its GID consists of the same bytes as its address.
    const auto destination_gid = find_local_gid(destination);
    identifier->remote_gid = destination_gid ? destination_gid->gid() : destination.bytes;
    set_local_gid(identifier, *local_gid);
    set_source_address(identifier, source, identifier->port_claim.port);
    store_address(&identifier->public_id.route.addr.dst_storage, destination,
                  get_port(&identifier->public_id.route.addr.dst_addr));
    identifier->public_id.route.addr.addr.ibaddr.dgid = identifier->remote_gid;
    return 0;
}

// Make the path record that rdma_resolve_route stores in the identifier.
ibv_sa_path_rec make_path(const Identifier& identifier) {
    ibv_sa_path_rec path{};
    path.dgid = identifier.remote_gid;
    path.sgid = identifier.local_gid->gid();
    path.hop_limit = 64;
    path.traffic_class = identifier.tos;
    path.reversible = 1;
    path.numb_path = 1;
    path.pkey = 0xffff;                                                          // the default partition key
    path.mtu_selector = path.rate_selector = path.packet_life_time_selector = 2; // IB_SA_EQ: the exact values
    path.mtu = static_cast<std::uint8_t>(identifier.local_gid->device->port_attr.active_mtu);
    path.rate = IBV_RATE_100_GBPS;
    path.packet_life_time = 16; // CMA_IBOE_PACKET_LIFETIME of the kernel
    return path;
}

} // namespace

int resolve_route_now(Identifier* identifier) {
    auto* const path = static_cast<ibv_sa_path_rec*>(std::calloc(1, sizeof(ibv_sa_path_rec)));
    if (path == nullptr) {
        return ENOMEM;
    }
    *path = make_path(*identifier);
    std::free(identifier->public_id.route.path_rec);
    identifier->public_id.route.path_rec = path;
    identifier->public_id.route.num_paths = 1;
    return 0;
}

int bind_to_any(Identifier* identifier, int family) {
    IpAddress any_address;
    any_address.family = family;
    if (family == AF_INET) {
        any_address.bytes.raw[10] = any_address.bytes.raw[11] = 0xff; // 0.0.0.0 in the form ::ffff:0.0.0.0
    }
    return bind_identifier(identifier, any_address, 0);
}

extern "C" {

int rdma_bind_addr(rdma_cm_id* id, sockaddr* addr) {
    return run_entry_with_errno("rdma_bind_addr", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr || get_address_length(addr) == 0) {
            return EINVAL;
        }
        std::lock_guard lock(manager_mutex());
        return identifier->state != State::idle ? EINVAL : bind_identifier(identifier, get_ip(addr), get_port(addr));
    });
}

// The last argument of the next two functions is a timeout. The twin resolves at once, so it ignores the timeout.
int rdma_resolve_addr(rdma_cm_id* id, sockaddr* src_addr, sockaddr* dst_addr, int) {
    return run_entry_with_errno("rdma_resolve_addr", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr || get_address_length(dst_addr) == 0 ||
            (src_addr != nullptr && get_address_length(src_addr) == 0)) {
            return EINVAL;
        }
        {
            std::lock_guard lock(manager_mutex());
            if (identifier->state == State::idle) {
                const int error = src_addr != nullptr
                                      ? bind_identifier(identifier, get_ip(src_addr), get_port(src_addr))
                                      : bind_to_any(identifier, dst_addr->sa_family);
                if (error != 0) {
                    return error;
                }
            }
            if (identifier->state != State::bound) {
                return EINVAL;
            }
            std::memcpy(&id->route.addr.dst_storage, dst_addr, get_address_length(dst_addr));
            const int error = resolve_destination(identifier, get_ip(dst_addr));
            identifier->state = error == 0 ? State::addr_resolved : State::bound;
            queue_event(identifier, error == 0 ? RDMA_CM_EVENT_ADDR_RESOLVED : RDMA_CM_EVENT_ADDR_ERROR, -error);
        }
        return wait_if_synchronous(identifier);
    });
}

int rdma_resolve_route(rdma_cm_id* id, int) {
    return run_entry_with_errno("rdma_resolve_route", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr) {
            return EINVAL;
        }
        {
            std::lock_guard lock(manager_mutex());
            if (identifier->state != State::addr_resolved) {
                return EINVAL;
            }
            if (const int error = resolve_route_now(identifier); error != 0) {
                return error;
            }
            identifier->state = State::route_resolved;
            queue_event(identifier, RDMA_CM_EVENT_ROUTE_RESOLVED);
        }
        return wait_if_synchronous(identifier);
    });
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
