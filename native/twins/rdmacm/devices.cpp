// Opens the devices of libibverbs, finds the device of an address, and implements rdma_get_devices.

#include "rdmacm/devices.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "rdmacm/functions.hpp"
#include "rdmacm/manager.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

constexpr std::size_t max_gid_count = 256;

// Open a device, and query its limits, its only port (number 1) and its GID table. Return nullptr if this fails.
std::unique_ptr<CmDevice> open_device(ibv_device* device) {
    auto cm_device = std::make_unique<CmDevice>();
    cm_device->verbs = ibv_open_device(device);
    if (cm_device->verbs == nullptr) {
        return nullptr;
    }
    ibv_device_attr attr{};
    cm_device->gids.resize(max_gid_count);
    const ssize_t gid_count = ibv_query_gid_table(cm_device->verbs, cm_device->gids.data(), cm_device->gids.size(), 0);
    if (ibv_query_device(cm_device->verbs, &attr) != 0 ||
        ibv_query_port(cm_device->verbs, 1, &cm_device->port_attr) != 0 || gid_count <= 0) {
        ibv_close_device(cm_device->verbs);
        return nullptr;
    }
    cm_device->gids.resize(static_cast<std::size_t>(gid_count));
    cm_device->max_responder_resources = static_cast<std::uint8_t>(std::min(attr.max_qp_rd_atom, 255));
    cm_device->max_initiator_depth = static_cast<std::uint8_t>(std::min(attr.max_qp_init_rd_atom, 255));
    return cm_device;
}

// Return the index of the GID from which a RoCE device sends if the source address is not one of its GIDs. This is the
// first GID of type RoCE v2, the default type of the kernel's connection manager, or else GID 0.
std::uint8_t choose_gid_index(const CmDevice& device) {
    const auto roce_v2_entry = std::find_if(device.gids.begin(), device.gids.end(), [](const ibv_gid_entry& entry) {
        return entry.gid_type == IBV_GID_TYPE_ROCE_V2;
    });
    return roce_v2_entry == device.gids.end() ? 0 : static_cast<std::uint8_t>(roce_v2_entry->gid_index);
}

} // namespace

const std::vector<std::unique_ptr<CmDevice>>& get_cm_devices(int* error) {
    static auto* const devices = new std::vector<std::unique_ptr<CmDevice>>;
    *error = 0;
    if (!devices->empty()) {
        return *devices;
    }
    int device_count = 0;
    ibv_device** const device_list = ibv_get_device_list(&device_count);
    if (device_list == nullptr) {
        *error = errno;
        return *devices;
    }
    for (int index = 0; index < device_count; ++index) {
        if (auto device = open_device(device_list[index])) {
            devices->push_back(std::move(device));
        }
    }
    ibv_free_device_list(device_list);
    return *devices;
}

ibv_pd* take_default_pd(CmDevice* device) {
    if (device->default_pd == nullptr) {
        device->default_pd = ibv_alloc_pd(device->verbs);
    }
    device->default_pd_user_count += device->default_pd == nullptr ? 0 : 1;
    return device->default_pd;
}

void release_default_pd(CmDevice* device) {
    if (--device->default_pd_user_count == 0) {
        ibv_dealloc_pd(device->default_pd);
        device->default_pd = nullptr;
    }
}

ibv_xrcd* get_default_xrc_domain(CmDevice* device) {
    if (device->default_xrc_domain == nullptr) {
        // A domain without a file (descriptor -1) belongs to this process alone.
        ibv_xrcd_init_attr attr{IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, -1, O_CREAT};
        device->default_xrc_domain = ibv_open_xrcd(device->verbs, &attr);
    }
    return device->default_xrc_domain;
}

std::optional<LocalGid> find_local_gid(const IpAddress& address) {
    int error = 0;
    const auto& devices = get_cm_devices(&error);
    std::optional<LocalGid> local_gid;
    for (const auto& device : devices) {
        for (const ibv_gid_entry& entry : device->gids) {
            // The GID table contains the address once for each GID type. Prefer the entry of type RoCE v2.
            if (is_same_gid(entry.gid, address.bytes) && (!local_gid || entry.gid_type == IBV_GID_TYPE_ROCE_V2)) {
                local_gid = LocalGid{device.get(), static_cast<std::uint8_t>(entry.gid_index)};
            }
        }
        if (local_gid) {
            return local_gid;
        }
    }
    if (devices.empty() || !is_host_address(address)) {
        return std::nullopt;
    }
    return LocalGid{devices.front().get(), choose_gid_index(*devices.front())};
}

extern "C" {

ibv_context** rdma_get_devices(int* num_devices) {
    if (num_devices != nullptr) {
        *num_devices = 0;
    }
    if (const int injected_error = find_injected_error("rdma_get_devices"); injected_error != 0) {
        errno = injected_error;
        return nullptr;
    }
    int error = 0;
    std::lock_guard lock(manager_mutex());
    const auto& devices = get_cm_devices(&error);
    auto** const contexts =
        error != 0 ? nullptr : static_cast<ibv_context**>(std::calloc(devices.size() + 1, sizeof(ibv_context*)));
    if (contexts == nullptr) {
        errno = error != 0 ? error : ENOMEM;
        return nullptr;
    }
    for (std::size_t index = 0; index < devices.size(); ++index) {
        contexts[index] = devices[index]->verbs;
    }
    if (num_devices != nullptr) {
        *num_devices = static_cast<int>(devices.size());
    }
    return contexts;
}

void rdma_free_devices(ibv_context** list) {
    std::free(list);
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
