// Joins and leaves multicast groups. On Ethernet a join needs no other process: once a queue pair is attached, the
// device receives the datagrams of the group.

#include "rdmacm/multicast.hpp"

#include <algorithm>
#include <cstring>

#include "rdmacm/functions.hpp"
#include "rdmacm/queue_pair.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

constexpr std::uint32_t multicast_qp_num = 0xffffff; // all multicast packets are sent to this number (InfiniBand)
// The bits of comp_mask in rdma_cma.h: RDMA_CM_JOIN_MC_ATTR_ADDRESS and RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS.
constexpr unsigned join_attr_address = 1, join_attr_flags = 2;
// The values of join_flags in rdma_cma.h: RDMA_MC_JOIN_FLAG_FULLMEMBER and RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER.
constexpr unsigned join_flag_full_member = 0, join_flag_send_only_full_member = 1;

// Return the GID of the group, as the kernel forms it on RoCE v2: the IPv6 address, or the IPv4 address in its
// IPv4-mapped form. IpAddress stores addresses in this form.
ibv_gid make_group_gid(const IpAddress& address) {
    return address.bytes;
}

int join_group(rdma_cm_id* public_id, const sockaddr* address, unsigned flags, void* context) {
    Identifier* const id = get_identifier(public_id);
    if (id == nullptr || get_address_length(address) == 0 || !is_datagram(*id)) {
        return EINVAL;
    }
    if (flags == join_flag_send_only_full_member) {
        return EOPNOTSUPP; // as the kernel does for a port that no subnet manager serves
    }
    if (flags != join_flag_full_member) {
        return EINVAL;
    }
    const IpAddress group = get_ip(address);
    std::lock_guard lock(manager_mutex());
    if ((id->state != State::bound && id->state != State::addr_resolved) || !id->local_gid || !group.is_multicast()) {
        return EINVAL;
    }
    id->joined_groups.push_back({group, make_group_gid(group), context, false});
    QueuedEvent event;
    event.type = RDMA_CM_EVENT_MULTICAST_JOIN;
    event.is_datagram = true;
    event.group = group;
    event.ud.ah_attr = make_path_to_remote(*id);
    event.ud.ah_attr.grh.dgid = make_group_gid(group);
    event.ud.qp_num = multicast_qp_num;
    event.ud.qkey = id->qkey;
    queue_event(id, event);
    return 0;
}

} // namespace

int attach_to_group(Identifier* id, const IpAddress& group_address, void** context) {
    ibv_gid gid{};
    {
        std::lock_guard lock(manager_mutex());
        const auto entry =
            std::find_if(id->joined_groups.begin(), id->joined_groups.end(),
                         [&](const JoinedGroup& joined_group) { return joined_group.address == group_address; });
        if (entry == id->joined_groups.end()) {
            return 0; // the identifier has left the group meanwhile
        }
        *context = entry->context;
        gid = entry->gid;
        entry->is_attached = id->public_id.qp != nullptr;
    }
    return id->public_id.qp == nullptr ? 0 : ibv_attach_mcast(id->public_id.qp, &gid, 0);
}

extern "C" {

int rdma_join_multicast(rdma_cm_id* id, sockaddr* addr, void* context) {
    return run_entry_with_errno("rdma_join_multicast", [&] {
        const int error = join_group(id, addr, join_flag_full_member, context);
        return error != 0 ? error : wait_if_synchronous(get_identifier(id));
    });
}

int rdma_join_multicast_ex(rdma_cm_id* id, rdma_cm_join_mc_attr_ex* attr, void* context) {
    return run_entry_with_errno("rdma_join_multicast_ex", [&] {
        if (attr == nullptr || (attr->comp_mask & ~(join_attr_address | join_attr_flags)) != 0 ||
            (attr->comp_mask & join_attr_address) == 0 || (attr->comp_mask & join_attr_flags) == 0) {
            return EINVAL;
        }
        const int error = join_group(id, attr->addr, attr->join_flags, context);
        return error != 0 ? error : wait_if_synchronous(get_identifier(id));
    });
}

int rdma_leave_multicast(rdma_cm_id* id, sockaddr* addr) {
    return run_entry_with_errno("rdma_leave_multicast", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr || get_address_length(addr) == 0) {
            return EINVAL;
        }
        const IpAddress group = get_ip(addr);
        JoinedGroup left_group;
        {
            std::lock_guard lock(manager_mutex());
            const auto entry =
                std::find_if(identifier->joined_groups.begin(), identifier->joined_groups.end(),
                             [&](const JoinedGroup& joined_group) { return joined_group.address == group; });
            if (entry == identifier->joined_groups.end()) {
                return EADDRNOTAVAIL;
            }
            left_group = *entry;
            identifier->joined_groups.erase(entry);
        }
        return left_group.is_attached && id->qp != nullptr ? ibv_detach_mcast(id->qp, &left_group.gid, 0) : 0;
    });
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
