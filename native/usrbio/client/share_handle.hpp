// The two formats by which one process tells another of its device memory; suites/vectors holds them and those of
// Python to the same bytes. A handle comes from another process: parsing believes nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "usrbio/client/process_identity.hpp"

namespace gdrkit::usrbio {

inline constexpr std::size_t share_handle_bytes = 192;
inline constexpr std::size_t gdr_handle_bytes = 80;

enum class ShareKind : std::uint16_t { ipc = 1, vmm = 2, dmabuf = 3 };

// The versioned handle (gdrkit/registration/handle.py): magic, version, an offset into the allocation, the device by
// its UUID, the owner by number, start and boot, and a checksum that finds damage. It is no signature.
struct ShareHandle {
    ShareKind kind = ShareKind::ipc;
    std::uint64_t allocation_bytes = 0; // IPC: of the allocation. VMM: of all chunks. dma-buf: its size.
    std::uint64_t offset_bytes = 0;     // Where the shared bytes begin in that.
    std::uint64_t length_bytes = 0;
    std::uint64_t address = 0;     // dma-buf: the owner's device address of the first shared byte; else 0.
    std::uint64_t chunk_bytes = 0; // VMM.
    std::uint32_t descriptor_count = 0;
    std::array<std::uint8_t, 16> device_uuid{};
    ProcessIdentity owner;
    std::array<std::uint8_t, 64> ipc{};
    bool operator==(const ShareHandle&) const = default;
};

// Nothing when the fields contradict each other or are out of their limits.
std::optional<std::array<std::uint8_t, share_handle_bytes>> pack(const ShareHandle& handle);
std::optional<ShareHandle> parse_share_handle(std::span<const std::uint8_t> bytes);

// The handle of the first generation (gdrkit/registration/gdr_handle.py): no offset, no version, no checksum, and the
// device by a number that two processes need not share.
struct GdrHandle {
    std::array<std::uint8_t, 64> ipc{};
    std::uint64_t length_bytes = 0;
    std::uint64_t device = 0;
    bool operator==(const GdrHandle&) const = default;
};

std::optional<std::array<std::uint8_t, gdr_handle_bytes>> pack(const GdrHandle& handle);
std::optional<GdrHandle> parse_gdr_handle(std::span<const std::uint8_t> bytes);

} // namespace gdrkit::usrbio
