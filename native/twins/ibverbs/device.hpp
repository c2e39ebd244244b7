// The RDMA devices of this machine: twin0, twin1, ... with one active Ethernet port each, as RoCE NICs have.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "ibverbs/abi.hpp"

namespace gdrkit::twin::verbs {

// What the queue pairs of a device did. `sent`: as requester, counted at success; `served`: as responder, for others.
struct Traffic {
    struct Direction {
        std::atomic<std::uint64_t> write_bytes{0}, read_bytes{0}, send_bytes{0}, requests{0};
    };
    Direction sent, served;
};

// Public structure first: clients hold pointers to it.
struct Device {
    ibv_device abi{};
    unsigned index = 0;
    std::array<std::uint8_t, 8> guid{};
    // Index 0 is RoCE v1, index 1 RoCE v2; both are the link-local address that the GUID makes.
    ibv_gid gid{};
    Traffic traffic;
};

inline constexpr int gid_count = 2;
inline constexpr std::uint16_t default_pkey = 0xffff;
inline constexpr std::uint32_t message_bytes_most = 1U << 30;
inline constexpr int completion_vector_count = 1;

unsigned device_count();
Device& device_at(unsigned index);

// nullptr when this is not a pointer to one of the devices.
Device* find_device(const ibv_device* device);

ibv_gid_type gid_type_at(unsigned index);

// The attributes of every device, and of its port.
ibv_device_attr device_attributes(const Device& device);
ibv_port_attr port_attributes();

// {"twin0": {"write_bytes": 0, ...}, ...}
std::string traffic_json();

} // namespace gdrkit::twin::verbs
