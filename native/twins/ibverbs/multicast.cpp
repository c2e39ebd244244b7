// ibv_attach_mcast and ibv_detach_mcast. On Ethernet the LID of a group has no meaning, and is ignored as in the
// kernel.

#include "ibverbs/datagram_queue_pair.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

using namespace gdrkit::twin::verbs;

namespace {

// Return the datagram queue pair behind `qp`. Return nullptr if `qp` is not a live datagram queue pair, or `group` is
// not a multicast GID. The kernel refuses both too (ib_attach_mcast).
DatagramQueuePair* find_datagram_pair(ibv_qp* qp, const ibv_gid& group) {
    if (!is_alive("ibv_qp", qp) || qp->qp_type != IBV_QPT_UD || !is_multicast_gid(group)) {
        return nullptr;
    }
    return static_cast<DatagramQueuePair*>(get_qp_handle(qp)->impl.get());
}

} // namespace

extern "C" {

int ibv_attach_mcast(ibv_qp* qp, const ibv_gid* gid, std::uint16_t) {
    if (const auto fault = find_injected_fault("ibv_attach_mcast")) {
        return *fault;
    }
    DatagramQueuePair* const pair = find_datagram_pair(qp, *gid);
    return pair != nullptr ? pair->attach(*gid) : EINVAL;
}

int ibv_detach_mcast(ibv_qp* qp, const ibv_gid* gid, std::uint16_t) {
    if (const auto fault = find_injected_fault("ibv_detach_mcast")) {
        return *fault;
    }
    DatagramQueuePair* const pair = find_datagram_pair(qp, *gid);
    return pair != nullptr ? pair->detach(*gid) : EINVAL;
}

} // extern "C"
