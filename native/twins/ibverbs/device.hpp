// The RDMA devices of the emulated machine: twin0, twin1, ..., each with one active Ethernet port, like RoCE NICs.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "ibverbs/abi.hpp"
#include "ibverbs/port_counters.hpp"
#include "model/fabric_address.hpp"

namespace gdrkit::twin::verbs {

// Traffic of a device's queue pairs. `sent` counts the successful requests that the queue pairs posted; `served` counts
// the requests that they carried out for peers.
struct Traffic {
    struct Direction {
        PayloadCounter write_bytes, read_bytes, send_bytes, atomic_bytes;
        std::atomic<std::uint64_t> requests{0};
    };
    explicit Traffic(unsigned device_index)
        : sent(make_direction(device_index, PortDirection::sent, PortDirection::received, Side::requester)),
          served(make_direction(device_index, PortDirection::received, PortDirection::sent, Side::responder)) {}
    // The payload of a read goes in the other direction than the payload of writes and sends.
    static Direction make_direction(unsigned device_index, PortDirection direction, PortDirection read_direction,
                                    Side side) {
        return {{device_index, direction, side},
                {device_index, read_direction, side},
                {device_index, direction, side},
                {device_index, direction, side}};
    }
    Direction sent, served;
};

// An emulated device. Clients hold pointers to `public_device`. Providers of rdma-core cast such a pointer to their
// private `struct verbs_device`, which continues behind the ibv_device with a pointer to the provider's table of
// functions, and compare that pointer with their own table (for example in mlx5dv_is_supported). So
// `provider_operations` must follow `public_device`. It is null, so that no provider mistakes a twin for its own
// device.
struct Device {
    explicit Device(unsigned device_index) : index(device_index), traffic(device_index) {}

    ibv_device public_device{};
    const void* provider_operations = nullptr;
    unsigned index;
    std::array<std::uint8_t, 8> guid{};
    // The GID at both indices, 0 (RoCE v1) and 1 (RoCE v2): the link-local address made from the GUID, or the address
    // of the NIC on the TCP fabric.
    ibv_gid gid{};
    Traffic traffic;
    std::atomic<std::uint64_t> device_memory_bytes{0}; // allocated by ibv_alloc_dm
};

// Number of entries of the GID table that have a GID.
inline constexpr int gid_count = 2;
// Length of the GID table. As in the table of a NIC, the entries from gid_count on are empty.
inline constexpr int gid_table_length = 4;
inline constexpr std::uint16_t default_pkey = 0xffff;
inline constexpr std::uint32_t max_message_bytes = 1U << 30;
// Size of the memory on a device, from which ibv_alloc_dm allocates.
inline constexpr std::uint64_t max_device_memory_bytes = 128U << 10;
inline constexpr int completion_vector_count = 1;

// Return the address on the TCP fabric of the NIC that has this GID.
inline FabricAddress make_fabric_address(const ibv_gid& gid) {
    return std::to_array(gid.raw);
}

unsigned device_count();
Device& device_at(unsigned index);

// Return the Device to which the public structure belongs, or nullptr if no device has this structure.
Device* find_device(const ibv_device* device);

// Return the type of the GID at this index of the GID table: RoCE v1 at 0, RoCE v2 at all others.
ibv_gid_type get_gid_type(unsigned index);

// Return the attributes of a device, and the attributes of its port.
ibv_device_attr make_device_attributes(const Device& device);
ibv_port_attr make_port_attributes();

// Return the traffic as JSON, for example {"twin0": {"write_bytes": 0, ...}}.
std::string format_traffic_json();

} // namespace gdrkit::twin::verbs
