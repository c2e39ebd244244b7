// Packs, parses and checks the two formats of handles of device memory.
#include "usrbio/client/share_handle.hpp"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>

#include "common/sha256.hpp"
#include "usrbio/host_page.hpp"

namespace gdrkit::usrbio {
namespace {

static_assert(std::endian::native == std::endian::little, "the structs below are the bytes of a handle");

constexpr char share_magic[8] = {'G', 'D', 'R', 'S', 'H', 'A', 'R', 'E'};
constexpr std::uint16_t share_version = 1;
constexpr std::size_t digest_bytes = 16;
constexpr std::uint64_t size_max = INT64_MAX; // Largest size of an allocation and of the shared bytes.
// SCM_MAX_FD: the most descriptors that one message of a socket can carry.
constexpr std::uint32_t descriptors_max = 253;

// The 192 bytes of a ShareHandle, little-endian and without padding.
struct ShareHandleBytes {
    char magic[8];
    std::uint16_t version;
    std::uint16_t kind;
    std::uint32_t handle_bytes;
    std::uint64_t allocation_bytes;
    std::uint64_t offset_bytes;
    std::uint64_t length_bytes;
    std::uint64_t address;
    std::uint64_t chunk_bytes;
    std::uint32_t descriptor_count;
    std::uint32_t reserved;
    std::uint8_t device_uuid[16];
    std::uint8_t owner_boot_id[16];
    std::uint32_t owner_process_id;
    std::uint32_t owner_namespace;
    std::uint64_t owner_started_ticks;
    std::uint8_t ipc[64];
    std::uint8_t digest[digest_bytes];
};
static_assert(sizeof(ShareHandleBytes) == share_handle_bytes && offsetof(ShareHandleBytes, allocation_bytes) == 16 &&
              offsetof(ShareHandleBytes, chunk_bytes) == 48 && offsetof(ShareHandleBytes, device_uuid) == 64 &&
              offsetof(ShareHandleBytes, owner_boot_id) == 80 && offsetof(ShareHandleBytes, owner_process_id) == 96 &&
              offsetof(ShareHandleBytes, owner_started_ticks) == 104 && offsetof(ShareHandleBytes, ipc) == 112 &&
              offsetof(ShareHandleBytes, digest) == 176);

// The 80 bytes of a GpuIpcHandle.
struct GpuIpcHandleBytes {
    std::uint8_t ipc[64];
    std::uint64_t length_bytes;
    std::uint64_t device;
};
static_assert(sizeof(GpuIpcHandleBytes) == gpu_ipc_handle_bytes && offsetof(GpuIpcHandleBytes, length_bytes) == 64 &&
              offsetof(GpuIpcHandleBytes, device) == 72);

bool has_nonzero_byte(std::span<const std::uint8_t> bytes) {
    return std::ranges::any_of(bytes, [](std::uint8_t byte) { return byte != 0; });
}

bool are_chunks_valid(const ShareHandle& handle) {
    const std::uint64_t chunk_bytes = handle.chunk_bytes, chunk_count = handle.descriptor_count;
    if (chunk_bytes == 0 || chunk_bytes % host_page_bytes() != 0 || chunk_count < 1 || chunk_count > descriptors_max ||
        chunk_bytes > size_max / chunk_count) {
        return false;
    }
    // Every chunk must contain some of the shared bytes.
    return handle.allocation_bytes == chunk_bytes * chunk_count && handle.offset_bytes < chunk_bytes &&
           handle.offset_bytes + handle.length_bytes > chunk_bytes * (chunk_count - 1);
}

bool is_address_valid(const ShareHandle& handle) {
    // Compare with the last address. The address after the last byte may wrap to 0.
    const bool is_in_address_space = handle.address != 0 && handle.length_bytes - 1 <= UINT64_MAX - handle.address;
    // A dma-buf consists of whole pages, so its first byte is at the beginning of a page.
    return is_in_address_space && (handle.address - handle.offset_bytes) % host_page_bytes() == 0;
}

bool is_kind_valid(const ShareHandle& handle) {
    if (has_nonzero_byte(handle.ipc) != (handle.kind == ShareKind::ipc)) {
        return false;
    }
    switch (handle.kind) {
    case ShareKind::ipc:
        return handle.chunk_bytes == 0 && handle.descriptor_count == 0 && handle.address == 0;
    case ShareKind::vmm:
        return handle.address == 0 && are_chunks_valid(handle);
    case ShareKind::dmabuf:
        return handle.chunk_bytes == 0 && handle.descriptor_count == 1 && is_address_valid(handle);
    }
    return false;
}

bool is_valid(const ShareHandle& handle) {
    if (handle.allocation_bytes == 0 || handle.allocation_bytes > size_max || handle.length_bytes == 0 ||
        handle.offset_bytes > handle.allocation_bytes ||
        handle.length_bytes > handle.allocation_bytes - handle.offset_bytes) {
        return false;
    }
    return is_kind_valid(handle) && has_nonzero_byte(handle.device_uuid) && handle.owner.process_id != 0;
}

bool is_valid(const GpuIpcHandle& handle) {
    return has_nonzero_byte(handle.ipc) && handle.length_bytes != 0 && handle.length_bytes <= size_max &&
           handle.device <= INT_MAX;
}

// Sets the digest: the first 16 bytes of the SHA-256 of all bytes before it.
void set_digest(ShareHandleBytes& bytes) {
    Sha256 hash;
    hash.add({reinterpret_cast<const char*>(&bytes), share_handle_bytes - digest_bytes});
    const Sha256::Digest digest = hash.finish();
    std::copy_n(digest.begin(), digest_bytes, bytes.digest);
}

} // namespace

std::optional<std::array<std::uint8_t, share_handle_bytes>> pack(const ShareHandle& handle) {
    if (!is_valid(handle)) {
        return std::nullopt;
    }
    ShareHandleBytes bytes{};
    std::memcpy(bytes.magic, share_magic, sizeof share_magic);
    bytes.version = share_version;
    bytes.kind = static_cast<std::uint16_t>(handle.kind);
    bytes.handle_bytes = share_handle_bytes;
    bytes.allocation_bytes = handle.allocation_bytes;
    bytes.offset_bytes = handle.offset_bytes;
    bytes.length_bytes = handle.length_bytes;
    bytes.address = handle.address;
    bytes.chunk_bytes = handle.chunk_bytes;
    bytes.descriptor_count = handle.descriptor_count;
    std::ranges::copy(handle.device_uuid, bytes.device_uuid);
    std::ranges::copy(handle.owner.boot_id, bytes.owner_boot_id);
    bytes.owner_process_id = handle.owner.process_id;
    bytes.owner_namespace = handle.owner.pid_namespace;
    bytes.owner_started_ticks = handle.owner.started_ticks;
    std::ranges::copy(handle.ipc, bytes.ipc);
    set_digest(bytes);
    return std::bit_cast<std::array<std::uint8_t, share_handle_bytes>>(bytes);
}

std::optional<ShareHandle> parse_share_handle(std::span<const std::uint8_t> data) {
    if (data.size() != share_handle_bytes) {
        return std::nullopt;
    }
    ShareHandleBytes bytes;
    std::memcpy(&bytes, data.data(), sizeof bytes);
    ShareHandleBytes expected_bytes = bytes;
    set_digest(expected_bytes);
    // The values of ShareKind are 1 to 3.
    if (std::memcmp(bytes.magic, share_magic, sizeof share_magic) != 0 || bytes.version != share_version ||
        std::memcmp(bytes.digest, expected_bytes.digest, digest_bytes) != 0 ||
        bytes.handle_bytes != share_handle_bytes || bytes.reserved != 0 || bytes.kind < 1 || bytes.kind > 3) {
        return std::nullopt;
    }
    ShareHandle handle;
    handle.kind = static_cast<ShareKind>(bytes.kind);
    handle.allocation_bytes = bytes.allocation_bytes;
    handle.offset_bytes = bytes.offset_bytes;
    handle.length_bytes = bytes.length_bytes;
    handle.address = bytes.address;
    handle.chunk_bytes = bytes.chunk_bytes;
    handle.descriptor_count = bytes.descriptor_count;
    std::ranges::copy(bytes.device_uuid, handle.device_uuid.begin());
    std::ranges::copy(bytes.owner_boot_id, handle.owner.boot_id.begin());
    handle.owner.process_id = bytes.owner_process_id;
    handle.owner.pid_namespace = bytes.owner_namespace;
    handle.owner.started_ticks = bytes.owner_started_ticks;
    std::ranges::copy(bytes.ipc, handle.ipc.begin());
    return is_valid(handle) ? std::optional(handle) : std::nullopt;
}

std::optional<std::array<std::uint8_t, gpu_ipc_handle_bytes>> pack(const GpuIpcHandle& handle) {
    if (!is_valid(handle)) {
        return std::nullopt;
    }
    GpuIpcHandleBytes bytes{};
    std::ranges::copy(handle.ipc, bytes.ipc);
    bytes.length_bytes = handle.length_bytes;
    bytes.device = handle.device;
    return std::bit_cast<std::array<std::uint8_t, gpu_ipc_handle_bytes>>(bytes);
}

std::optional<GpuIpcHandle> parse_gpu_ipc_handle(std::span<const std::uint8_t> data) {
    if (data.size() != gpu_ipc_handle_bytes) {
        return std::nullopt;
    }
    GpuIpcHandleBytes bytes;
    std::memcpy(&bytes, data.data(), sizeof bytes);
    GpuIpcHandle handle;
    std::ranges::copy(bytes.ipc, handle.ipc.begin());
    handle.length_bytes = bytes.length_bytes;
    handle.device = bytes.device;
    return is_valid(handle) ? std::optional(handle) : std::nullopt;
}

} // namespace gdrkit::usrbio
