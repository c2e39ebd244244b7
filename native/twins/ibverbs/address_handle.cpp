// The verbs functions of address handles: create and destroy an address handle, and derive it from a received datagram.

#include "ibverbs/address_handle.hpp"

#include <endian.h>
#include <netinet/in.h>
#include <netinet/ip.h>

#include <algorithm>
#include <cstring>

#include "ibverbs/datagram_frame.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Value of next_hdr in the GRH of a RoCE v1 packet: an InfiniBand transport header follows.
constexpr std::uint8_t roce_v1_next_header = 0x1b;

// Return whether an address handle can have this path. As in the kernel (rdma_check_ah_attr, ib_resolve_eth_dmac), a
// path on Ethernet needs a global route to a GID that is not zero. A device has only the port 1.
bool is_valid_path(const ibv_ah_attr& path) {
    constexpr ibv_gid no_gid{};
    return path.port_num == 1 && path.is_global == 1 && path.grh.sgid_index < gid_count && path.sl < 16 &&
           !is_same_gid(path.grh.dgid, no_gid);
}

// Return the index in the GID table of the device at which this GID has this type, or -1 with errno EINVAL.
int find_gid_index(const Device& device, const ibv_gid& gid, ibv_gid_type gid_type) {
    for (unsigned gid_index = 0; gid_index < gid_count; ++gid_index) {
        if (is_same_gid(device.gid, gid) && get_gid_type(gid_index) == gid_type) {
            return static_cast<int>(gid_index);
        }
    }
    return fail_minus1(EINVAL);
}

// Return the GID of an IPv4 address in network byte order: the IPv4-mapped IPv6 address ::ffff:a.b.c.d.
ibv_gid make_ipv4_gid(std::uint32_t address) {
    ibv_gid gid{};
    gid.raw[10] = gid.raw[11] = 0xff;
    std::memcpy(gid.raw + 12, &address, sizeof address);
    return gid;
}

// Copy the last 20 of the 40 bytes of the GRH to *ipv4, and return whether they are an IPv4 header. RoCE v2 over IPv4
// has the IPv4 header there. In an IPv6 header, these bytes can begin like an IPv4 header by chance, so the checksum
// decides: the ones' complement sum of a valid IPv4 header is 0xffff.
bool read_ipv4_header(const ibv_grh& grh, iphdr* ipv4) {
    std::memcpy(ipv4, reinterpret_cast<const char*>(&grh) + sizeof grh - sizeof *ipv4, sizeof *ipv4);
    if (ipv4->version != 4 || ipv4->ihl != sizeof *ipv4 / 4) {
        return false;
    }
    std::uint16_t header_words[sizeof *ipv4 / 2];
    std::memcpy(header_words, ipv4, sizeof *ipv4);
    std::uint32_t word_sum = 0;
    for (const std::uint16_t word : header_words) {
        word_sum += word;
    }
    // Add the carries, in the upper 16 bits, to the lower 16 bits. The addition can carry once more.
    word_sum = (word_sum & 0xffff) + (word_sum >> 16);
    return (word_sum & 0xffff) + (word_sum >> 16) == 0xffff;
}

// Store in *route the route back to the sender of the datagram that has this network header. Return 0, or -1 with errno
// set.
int fill_route(const Device& device, const ibv_grh& grh, ibv_global_route* route) {
    iphdr ipv4{};
    ibv_gid local_gid = grh.dgid;
    ibv_gid_type gid_type = IBV_GID_TYPE_ROCE_V2;
    // The version (4 bits), traffic class (8) and flow label (20) of an IPv6 header.
    const std::uint32_t version_class_flow = be32toh(grh.version_tclass_flow);
    if (read_ipv4_header(grh, &ipv4)) {
        local_gid = make_ipv4_gid(ipv4.daddr);
        route->dgid = make_ipv4_gid(ipv4.saddr);
        route->hop_limit = ipv4.ttl;
        route->traffic_class = ipv4.tos;
    } else if (version_class_flow >> 28 == 6 && (grh.next_hdr == IPPROTO_UDP || grh.next_hdr == roce_v1_next_header)) {
        gid_type = grh.next_hdr == IPPROTO_UDP ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
        route->dgid = grh.sgid;
        route->hop_limit = grh.hop_limit;
        route->traffic_class = static_cast<std::uint8_t>(version_class_flow >> 20);
    } else {
        return fail_minus1(EPROTONOSUPPORT);
    }
    // Like rdma-core, set the flow label for IPv4 too, although an IPv4 header has none.
    route->flow_label = version_class_flow & 0xfffff;
    // A multicast group is not in the GID table, so no source can be derived from it (as in rdma-core).
    const int index = is_multicast_gid(local_gid) ? fail_minus1(EINVAL) : find_gid_index(device, local_gid, gid_type);
    route->sgid_index = static_cast<std::uint8_t>(std::max(index, 0));
    return index < 0 ? -1 : 0;
}

} // namespace
} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
    if (const auto fault = find_injected_fault("ibv_create_ah")) {
        return fail_null(*fault);
    }
    if (!is_alive("ibv_pd", pd) || !is_valid_path(*attr)) {
        return fail_null(EINVAL);
    }
    ProtectionDomain* const domain = get_domain(pd);
    auto handle = std::make_unique<AddressHandle>();
    handle->public_ah.context = pd->context;
    handle->public_ah.pd = pd;
    handle->public_ah.handle = make_next_handle();
    handle->impl = std::make_shared<const AddressVector>(AddressVector{domain, *attr});
    ++domain->child_count;
    track("ibv_ah", handle.get());
    return &handle.release()->public_ah;
}

int ibv_destroy_ah(ibv_ah* ah) {
    if (const auto fault = find_injected_fault("ibv_destroy_ah")) {
        return *fault;
    }
    AddressHandle* const handle = get_address_handle(ah);
    if (!is_alive("ibv_ah", handle)) {
        return EINVAL;
    }
    ProtectionDomain* const domain = handle->impl->domain;
    if (!retire("ibv_ah", handle)) {
        return EINVAL;
    }
    handle->impl.reset();
    --domain->child_count;
    return 0;
}

int ibv_init_ah_from_wc(ibv_context* public_context, std::uint8_t port_num, ibv_wc* wc, ibv_grh* grh,
                        ibv_ah_attr* ah_attr) {
    if (const auto fault = find_injected_fault("ibv_init_ah_from_wc")) {
        return fail_minus1(*fault);
    }
    Context* const context = get_context(public_context);
    if (!is_alive("ibv_context", context) || port_num != 1) {
        return fail_minus1(EINVAL);
    }
    *ah_attr = {};
    ah_attr->dlid = wc->slid;
    ah_attr->sl = wc->sl;
    ah_attr->src_path_bits = wc->dlid_path_bits;
    ah_attr->port_num = port_num;
    if ((wc->wc_flags & IBV_WC_GRH) == 0) {
        return 0;
    }
    ah_attr->is_global = 1;
    return fill_route(*context->device, *grh, &ah_attr->grh);
}

ibv_ah* ibv_create_ah_from_wc(ibv_pd* pd, ibv_wc* wc, ibv_grh* grh, std::uint8_t port_num) {
    if (const auto fault = find_injected_fault("ibv_create_ah_from_wc")) {
        return fail_null(*fault);
    }
    ibv_ah_attr attr{};
    if (!is_alive("ibv_pd", pd)) {
        return fail_null(EINVAL);
    }
    return ibv_init_ah_from_wc(pd->context, port_num, wc, grh, &attr) == 0 ? ibv_create_ah(pd, &attr) : nullptr;
}

} // extern "C"
