// The RDMA devices that the connection manager uses, opened through the libibverbs.so.1 that this process has loaded.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "rdmacm/address.hpp"

namespace gdrkit::twin::rdmacm {

// A device. It is opened once and never closed, as in librdmacm.
struct CmDevice {
    ibv_context* verbs = nullptr;
    std::vector<ibv_gid_entry> gids; // the entry at position n has the gid_index n, because the table has no gaps
    ibv_port_attr port_attr{};
    // The largest numbers of RDMA reads and atomics that a queue pair can have in progress.
    std::uint8_t max_responder_resources = 0; // requested by the peer
    std::uint8_t max_initiator_depth = 0;     // requested by this side
    // The protection domain of identifiers to which the program gives none, and the number of these identifiers.
    ibv_pd* default_pd = nullptr;
    int default_pd_user_count = 0;
    // The XRC domain of identifiers to which the program gives none. It stays open, as in librdmacm.
    ibv_xrcd* default_xrc_domain = nullptr;
};

// The caller of the functions below holds the lock of the connection manager.

// Return the devices, without those that cannot be opened. The first call opens them. Store in *error an errno if the
// list of devices cannot be read, else 0.
const std::vector<std::unique_ptr<CmDevice>>& get_cm_devices(int* error);

// Return the default protection domain of the device, and increment the number of its users. Return nullptr with errno
// set on failure.
ibv_pd* take_default_pd(CmDevice* device);
// Decrement the number of users of the default protection domain. The last user deallocates it.
void release_default_pd(CmDevice* device);

// Return the default XRC domain of the device, or nullptr with errno set on failure.
ibv_xrcd* get_default_xrc_domain(CmDevice* device);

// The device for a local address, and the index of the GID from which it sends.
struct LocalGid {
    CmDevice* device = nullptr;
    std::uint8_t gid_index = 0;
    [[nodiscard]] const ibv_gid& gid() const { return device->gids[gid_index].gid; }
};

// Find the device for a local address. This is the device that has the address as a GID, or the first device for every
// other address of this host (a loopback address, for example). Return nullopt if this host does not have the address,
// or has no device.
std::optional<LocalGid> find_local_gid(const IpAddress& address);

} // namespace gdrkit::twin::rdmacm
