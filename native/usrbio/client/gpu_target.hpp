// Name and target of the symbolic link of a GPU iov. Other processes write names and targets, so parsing is strict.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace gdrkit::usrbio {

// The target of a link. Its text is
//   gdr://v2/device/<d>/allocation/<bytes>/offset/<bytes>/size/<bytes>/ipc/<128 hexadecimal digits>
// For memory without an IPC handle (memory of cuMemCreate or cuMemAllocAsync), "/dmabuf" replaces "/ipc/<digits>". Only
// the agent, which received the dma-buf, can access such memory. The target never contains an address.
struct GpuTarget {
    int device = 0;                                  // The number of the device in the process that owns the memory.
    std::uint64_t allocation_bytes = 0;              // Size of the allocation, or of the dma-buf.
    std::uint64_t offset_bytes = 0;                  // Offset of the iov in the allocation, or in the dma-buf.
    std::uint64_t size_bytes = 0;                    // Size of the iov.
    std::optional<std::array<std::uint8_t, 64>> ipc; // CUipcMemHandle of the allocation.
    bool operator==(const GpuTarget&) const = default;
};

std::string format_target(const GpuTarget& target);

// Parses a text in exactly the form that format_target writes. Returns nothing for any other text and for an invalid
// target. In a valid target, offset <= allocation, 0 < size <= allocation - offset, and an IPC handle is not all zeros.
std::optional<GpuTarget> parse_target(std::string_view text);

// Returns the name of the link, <uuid>.gdr.d<device>, in which the UUID has hyphens.
std::string make_gpu_link_name(const std::uint8_t id[16], int device);

// The UUID and the device of a link's name. The device number is valid in the owner's process. In another process the
// device may have another number (CUDA_VISIBLE_DEVICES).
struct GpuLinkName {
    std::array<std::uint8_t, 16> id{};
    int owner_device = 0;
};

// Parses a name of exactly the form that make_gpu_link_name writes. Returns nothing for any other name.
std::optional<GpuLinkName> parse_gpu_link_name(std::string_view name);

} // namespace gdrkit::usrbio
