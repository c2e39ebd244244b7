// Name and target of the symbolic link of a GPU iov. Other processes write them, so parsing is strict.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace gdrkit::usrbio {

// gdr://v2/device/<d>/allocation/<bytes>/offset/<bytes>/size/<bytes>/ipc/<128 hexadecimal digits>. For memory without
// an IPC handle (VMM, pools), /dmabuf replaces /ipc/<digits>: only the agent that received the dma-buf can access it.
// The target never contains an address.
struct GpuTarget {
    int device = 0;
    std::uint64_t allocation_bytes = 0;
    std::uint64_t offset_bytes = 0;
    std::uint64_t size_bytes = 0;
    std::optional<std::array<std::uint8_t, 64>> ipc;
    bool operator==(const GpuTarget&) const = default;
};

std::string format_target(const GpuTarget& target);

// Returns nothing unless `text` is exactly what format_target writes for a valid target: offset <= allocation, 0 < size
// <= allocation - offset, and an IPC handle that is not all zeros.
std::optional<GpuTarget> parse_target(std::string_view text);

// Returns <uuid>.gdr.d<device>, the UUID with hyphens.
std::string gpu_link_name(const std::uint8_t id[16], int device);

// Returns the 16 bytes of the UUID in such a name, if it is of this device.
std::optional<std::array<std::uint8_t, 16>> parse_gpu_link_name(std::string_view name, int device);

} // namespace gdrkit::usrbio
