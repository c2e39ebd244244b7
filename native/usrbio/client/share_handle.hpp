// The two formats of handles by which a process shares its device memory with another process. A handle comes from
// another process, so parsing checks every field. gdrkit/registration implements both formats in Python, and tests
// compare both implementations by the test vectors in suites/vectors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "usrbio/client/process_identity.hpp"

namespace gdrkit::usrbio {

inline constexpr std::size_t share_handle_bytes = 192;
inline constexpr std::size_t gpu_ipc_handle_bytes = 80;

// The method by which memory is shared: a CUDA IPC handle; descriptors of the chunks of VMM memory
// (cuMemExportToShareableHandle), one for each chunk; or the descriptor of a dma-buf.
enum class ShareKind : std::uint16_t { ipc = 1, vmm = 2, dmabuf = 3 };

// The versioned handle (gdrkit/registration/handle.py). Its bytes also contain a magic number, a version, and a
// checksum, which detects damage but does not prevent forgery.
struct ShareHandle {
    ShareKind kind = ShareKind::ipc;
    std::uint64_t allocation_bytes = 0; // Size of the allocation (IPC), of all chunks (VMM) or of the dma-buf.
    std::uint64_t offset_bytes = 0;     // Offset of the shared bytes in the allocation.
    std::uint64_t length_bytes = 0;     // Number of shared bytes.
    std::uint64_t address = 0;     // For a dma-buf: the owner's device address of the first shared byte; otherwise 0.
    std::uint64_t chunk_bytes = 0; // Size of each chunk (VMM); otherwise 0.
    // Number of descriptors that are sent with the handle: one for each chunk (VMM), 1 (dma-buf) or 0 (IPC).
    std::uint32_t descriptor_count = 0;
    std::array<std::uint8_t, 16> device_uuid{};
    ProcessIdentity owner;
    std::array<std::uint8_t, 64> ipc{}; // CUipcMemHandle; zeros for other kinds than IPC.
    bool operator==(const ShareHandle&) const = default;
};

// These functions return nothing if the fields contradict each other or are out of range. parse_share_handle() also
// returns nothing if the magic number, the version or the checksum is wrong.
std::optional<std::array<std::uint8_t, share_handle_bytes>> pack(const ShareHandle& handle);
std::optional<ShareHandle> parse_share_handle(std::span<const std::uint8_t> bytes);

// The older handle (gdrkit/registration/gdr_handle.py), without offset, version and checksum. It identifies the device
// by its number in the owner's process, which may differ from its number in the importer's process.
struct GpuIpcHandle {
    std::array<std::uint8_t, 64> ipc{};
    std::uint64_t length_bytes = 0;
    std::uint64_t device = 0;
    bool operator==(const GpuIpcHandle&) const = default;
};

std::optional<std::array<std::uint8_t, gpu_ipc_handle_bytes>> pack(const GpuIpcHandle& handle);
std::optional<GpuIpcHandle> parse_gpu_ipc_handle(std::span<const std::uint8_t> bytes);

} // namespace gdrkit::usrbio
