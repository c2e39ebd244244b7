// The responder grants regions to its peer, and revokes the grants. A grant lets the process of the peer copy directly
// to and from the region (grants.hpp).
#include "ibverbs/connected_queue_pair.hpp"

namespace gdrkit::twin::verbs {

// Let the peer access the region directly from now on. A memory window is not granted, because its bounds differ from
// its region's bounds.
void ConnectedQueuePair::grant(Region* region, std::uint32_t rkey, const Connection& connection) {
    if (connection.grants == nullptr || region->rkey != rkey || connection.grants->has_granted(rkey)) {
        return;
    }
    Lock lock(mutex_);
    if (is_closing_ || !can_receive_requests() || connection.generation != generation_) {
        return;
    }
    unsigned granted_access = 0;
    for (const unsigned access_flag : {IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ}) {
        granted_access |= region->permits(access_flag) && permits(lock, access_flag) ? access_flag : 0;
    }
    connection.grants->grant(region, granted_access);
}

// Revoke the grants of a connection whose link is destroyed next.
void ConnectedQueuePair::close_grants(const Connection& connection) {
    if (connection.grants != nullptr) {
        connection.grants->close();
    }
}

void ConnectedQueuePair::revoke_grants(const Lock&) {
    for (const Connection& connection : connections_) {
        if (connection.grants != nullptr) {
            connection.grants->revoke_all();
        }
    }
}

} // namespace gdrkit::twin::verbs
