// What the symbolic link of a GPU iov says: its name and its target. Both are read by other processes, and what they
// say is believed by nobody: parsing is strict.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace gdrkit::usrbio {

// gdr://v2/device/<d>/allocation/<bytes>/offset/<bytes>/size/<bytes>/ipc/<128 hexadecimal digits>, or, for memory that
// has no IPC handle (VMM, pools), the same with /dmabuf at its end: only the agent that got the dma-buf can reach it.
// No address of a process is in it.
struct GpuTarget {
    int device = 0;
    std::uint64_t allocation_bytes = 0;
    std::uint64_t offset_bytes = 0;
    std::uint64_t size_bytes = 0;
    std::optional<std::array<std::uint8_t, 64>> ipc;
    bool operator==(const GpuTarget&) const = default;
};

std::string format_target(const GpuTarget& target);

// Nothing unless every character is the one that format_target would have written for a target that makes sense
// (offset <= allocation, 0 < size <= allocation - offset, an IPC handle that is not all zeros).
std::optional<GpuTarget> parse_target(std::string_view text);

// <uuid>.gdr.d<device>, the UUID with hyphens.
std::string gpu_link_name(const std::uint8_t id[16], int device);

// The 16 bytes of the UUID in such a name, when it is of this device.
std::optional<std::array<std::uint8_t, 16>> parse_gpu_link_name(std::string_view name, int device);

} // namespace gdrkit::usrbio
