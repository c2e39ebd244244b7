// The content of the 64-byte handles by which processes share memory, events and memory pools.
#pragma once

#include <fcntl.h>

#include <cstdio>
#include <cstring>
#include <string_view>

#include "cuda/cuda_abi.hpp"
#include "cuda/memory.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin::cuda {

// A handle comes from an untrusted process, so read_handle() and its callers check every field.
struct HandleMessage {
    char magic[8];                  // the type of the shared object
    std::uint64_t owner_service_id; // id of the control service of the owning process
    std::uint64_t object_id;        // id of the object in the owning process; for a pool: the type of its location
    std::uint64_t length_bytes;     // length of the memory; for a pool: the id of its location
    std::int32_t physical_number;   // for memory: the number of the device (visible_devices.hpp)
    std::uint32_t reserved;         // zero
    Handle pool;                    // for a pool and its memory: the handle of the pool in the owning process
    std::uint64_t reserved_too;     // zero
    std::uint64_t checksum;         // checksum of all bytes before this field
};
static_assert(sizeof(HandleMessage) == sizeof(IpcHandle) && offsetof(HandleMessage, checksum) == 56);

inline constexpr std::string_view memory_magic = "gdrkitIP", event_magic = "gdrkitIE", pool_magic = "gdrkitMP",
                                  pool_memory_magic = "gdrkitPP";

inline std::uint64_t compute_checksum(const HandleMessage& message) {
    std::uint64_t hash = 0xcbf29ce484222325; // the constants are defined by the hash function FNV-1a
    const auto* bytes = reinterpret_cast<const unsigned char*>(&message);
    for (std::size_t index = 0; index < offsetof(HandleMessage, checksum); ++index) {
        hash = (hash ^ bytes[index]) * 0x100000001b3;
    }
    return hash;
}

// Store the message in a handle after setting its magic, owner_service_id (of this process) and checksum.
inline void write_handle(std::string_view magic, HandleMessage message, IpcHandle* handle) {
    std::memcpy(message.magic, magic.data(), sizeof message.magic);
    message.owner_service_id = read_control_service_id();
    message.checksum = compute_checksum(message);
    std::memcpy(handle, &message, sizeof message);
}

// Read the message of a handle. Return false if the handle is malformed or belongs to an object of another type.
inline bool read_handle(std::string_view magic, const IpcHandle& handle, HandleMessage* message) {
    std::memcpy(message, &handle, sizeof *message);
    return std::memcmp(message->magic, magic.data(), sizeof message->magic) == 0 &&
           message->checksum == compute_checksum(*message) && message->reserved == 0 && message->reserved_too == 0;
}

// Return the message that describes the memory of a range, and record the range as exported. Another process maps the
// memory by map_imported_memory (ipc.cpp).
HandleMessage export_memory(const RangeRef& range);

// Map memory that another process owns, as memory of a device or of the host. Fail if the other process has ended or
// has freed the memory. The caller sets the other members of the range and adds it to the address space.
Result map_imported_memory(const HandleMessage& message, MemoryKind kind, RangeRef* new_range, bool is_host = false);

// Reopen a memory file, to send the new descriptor to another process. While that descriptor is open, the memory counts
// as referenced. A duplicate made by dup() would not count.
inline Fd reopen(int fd) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return Fd(open(path, O_RDWR | O_CLOEXEC));
}

} // namespace gdrkit::twin::cuda
