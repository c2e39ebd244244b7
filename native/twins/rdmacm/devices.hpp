// The RDMA devices that the connection manager uses. They belong to the libibverbs.so.1 that this process has loaded.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "rdmacm/address.hpp"

namespace gdrkit::twin::rdmacm {

// A device, opened once and for the rest of the process, as librdmacm does.
struct CmDevice {
    ibv_context* verbs = nullptr;
    std::vector<ibv_gid_entry> gids;
    ibv_port_attr port{};
    std::uint8_t max_responder_resources = 0;
    std::uint8_t max_initiator_depth = 0;
    // The default protection domain, for identifiers without a domain from the program, and the number of its users.
    ibv_pd* pd = nullptr;
    int pd_user_count = 0;
    // The default XRC domain, for identifiers without one from the program. It stays open, as in librdmacm.
    ibv_xrcd* xrc_domain = nullptr;
};

// Return the devices. They are opened at the first call. A device that cannot be opened is left out. Store in *error an
// errno if the list of devices cannot be read. The caller holds the lock of the connection manager.
const std::vector<std::unique_ptr<CmDevice>>& get_cm_devices(int* error);

// Return the default protection domain of the device, and count a user of it. Return nullptr with errno set on failure.
ibv_pd* take_default_pd(CmDevice* device);
void release_default_pd(CmDevice* device);

// Return the default XRC domain of the device, or nullptr with errno set on failure.
ibv_xrcd* get_default_xrc_domain(CmDevice* device);

// A device together with the index of one of its GIDs.
struct LocalPort {
    CmDevice* device = nullptr;
    std::uint8_t gid_index = 0;
    [[nodiscard]] const ibv_gid& gid() const { return device->gids[gid_index].gid; }
};

// Find the device of a local address: the device with this address as a GID, or the first device for another address of
// this host. Return nullopt if there is no such device.
std::optional<LocalPort> find_local_port(const IpAddress& address);

} // namespace gdrkit::twin::rdmacm
