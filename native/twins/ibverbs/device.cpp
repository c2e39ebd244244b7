// The emulated RDMA devices, their traffic statistics, and the functions that list and name devices.

#include "ibverbs/device.hpp"

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "ibverbs/grants.hpp"
#include "ibverbs/session.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {
namespace {

static_assert(offsetof(Device, provider_operations) == sizeof(ibv_device));

// Return the 64-bit FNV-1a hash of a text, folded to 32 bits. All processes of a domain (emulated machine) must compute
// the same GUIDs, and std::hash does not guarantee this.
std::uint32_t compute_fnv1a_hash(std::string_view text) {
    std::uint64_t hash = 0xcbf29ce484222325U;
    for (const char character : text) {
        hash = (hash ^ static_cast<unsigned char>(character)) * 0x100000001b3U;
    }
    return static_cast<std::uint32_t>(hash ^ (hash >> 32));
}

std::unique_ptr<Device> make_device(unsigned index) {
    auto device = std::make_unique<Device>(index);
    // The GUID is the EUI-64 of the MAC address 02:hh:hh:hh:hh:index, where hh are bytes of the hash. The bit 02 marks
    // the MAC address as locally administered. An EUI-64 contains the inverse of this bit, so the first byte is 0. On
    // the TCP fabric, the hash also covers the fabric address, so the GUIDs of two machines differ.
    std::string hashed_name = config().domain;
    if (!config().fabric_addresses.empty()) {
        hashed_name.append(reinterpret_cast<const char*>(config().fabric_addresses[index].data()),
                           sizeof(FabricAddress));
    }
    const std::uint32_t hash = compute_fnv1a_hash(hashed_name);
    device->guid = {0x00,
                    static_cast<std::uint8_t>(hash >> 24),
                    static_cast<std::uint8_t>(hash >> 16),
                    0xff,
                    0xfe,
                    static_cast<std::uint8_t>(hash >> 8),
                    static_cast<std::uint8_t>(hash),
                    static_cast<std::uint8_t>(index)};
    // The GID is the link-local address fe80::GUID. On the TCP fabric, it is the fabric address of the device.
    device->gid.raw[0] = 0xfe;
    device->gid.raw[1] = 0x80;
    std::memcpy(device->gid.raw + 8, device->guid.data(), device->guid.size());
    if (!config().fabric_addresses.empty()) {
        std::memcpy(device->gid.raw, config().fabric_addresses[index].data(), sizeof device->gid.raw);
    }
    ibv_device& public_device = device->public_device;
    public_device.node_type = IBV_NODE_CA;
    public_device.transport_type = IBV_TRANSPORT_IB;
    std::snprintf(public_device.name, sizeof public_device.name, "twin%u", index);
    std::snprintf(public_device.dev_name, sizeof public_device.dev_name, "uverbs%u", index);
    std::snprintf(public_device.dev_path, sizeof public_device.dev_path, "/sys/class/infiniband_verbs/uverbs%u", index);
    std::snprintf(public_device.ibdev_path, sizeof public_device.ibdev_path, "/sys/class/infiniband/twin%u", index);
    return device;
}

const std::vector<std::unique_ptr<Device>>& devices() {
    static const auto* const instance = [] {
        auto* const new_devices = new std::vector<std::unique_ptr<Device>>;
        for (unsigned index = 0; index < config().nic_count; ++index) {
            new_devices->push_back(make_device(index));
        }
        return new_devices;
    }();
    return *instance;
}

void append_traffic(std::string* json, const std::string& name_prefix, const Traffic::Direction& direction) {
    const auto append_field = [&](const char* name, std::uint64_t value) {
        *json += (json->ends_with('{') ? "\"" : ",\"") + name_prefix + name + "\":" + std::to_string(value);
    };
    append_field("write_bytes", direction.write_bytes);
    append_field("read_bytes", direction.read_bytes);
    append_field("send_bytes", direction.send_bytes);
    append_field("atomic_bytes", direction.atomic_bytes);
    append_field("requests", direction.requests);
}

} // namespace

unsigned device_count() {
    return static_cast<unsigned>(devices().size());
}

Device& device_at(unsigned index) {
    return *devices()[index];
}

Device* find_device(const ibv_device* device) {
    for (const auto& candidate : devices()) {
        if (&candidate->public_device == device) {
            return candidate.get();
        }
    }
    return nullptr;
}

ibv_gid_type get_gid_type(unsigned index) {
    return index == 0 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
}

std::string format_traffic_json() {
    collect_granted_traffic();
    std::string json = "{";
    for (const auto& device : devices()) {
        json += (json.size() > 1 ? ",\"" : "\"") + std::string(device->public_device.name) + "\":{";
        append_traffic(&json, "", device->traffic.sent);
        append_traffic(&json, "served_", device->traffic.served);
        json += "}";
    }
    return json + "}";
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_device** ibv_get_device_list(int* num_devices) {
    if (num_devices != nullptr) {
        *num_devices = 0;
    }
    if (!start_session().empty()) {
        return fail_null(EINVAL);
    }
    if (const auto fault = find_injected_fault("ibv_get_device_list")) {
        return fail_null(*fault);
    }
    const unsigned count = device_count();
    auto** const list = static_cast<ibv_device**>(std::calloc(count + 1, sizeof(ibv_device*)));
    if (list == nullptr) {
        return fail_null(ENOMEM);
    }
    for (unsigned index = 0; index < count; ++index) {
        list[index] = &device_at(index).public_device;
    }
    if (num_devices != nullptr) {
        *num_devices = static_cast<int>(count);
    }
    return list;
}

void ibv_free_device_list(ibv_device** list) {
    std::free(list);
}

const char* ibv_get_device_name(ibv_device* device) {
    return device->name;
}

__be64 ibv_get_device_guid(ibv_device* device) {
    __be64 guid = 0;
    if (const Device* twin_device = find_device(device)) {
        std::memcpy(&guid, twin_device->guid.data(), sizeof guid);
    }
    return guid;
}

int ibv_get_device_index(ibv_device* device) {
    const Device* twin_device = find_device(device);
    return twin_device == nullptr ? fail_minus1(ENODEV) : static_cast<int>(twin_device->index);
}

} // extern "C"
