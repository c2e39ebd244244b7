// Helpers for the tests of the software twin of libhl-thunk (the library of Intel Gaudi accelerators). They open the
// twin with dlopen and call its functions by name.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "check.hpp"
#include "hlthunk/hlthunk_abi.hpp"

namespace gdrkit::twin::gaudi {

using u64 = std::uint64_t;
inline constexpr std::uint32_t export_flags = O_RDWR | O_CLOEXEC;

// Return the dlopen handle of the hl-thunk twin.
inline void* twin_library() {
    static void* const library_handle = [] {
        void* handle = dlopen(GDRKIT_HLTHUNK_TWIN, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(1);
        }
        return handle;
    }();
    return library_handle;
}

// Call a function by name. The compiler does not convert the arguments, so each one must have the type of its parameter
// in the C interface.
template <typename Result = int, typename... Arguments>
Result call_library(const char* symbol, Arguments... arguments) {
    void* const function_address = dlsym(twin_library(), symbol);
    CHECK(function_address != nullptr);
    return reinterpret_cast<Result (*)(Arguments...)>(function_address)(arguments...);
}

inline int open_first_device() {
    const int fd = call_library("hlthunk_open", static_cast<int>(dont_care), static_cast<const char*>(nullptr));
    CHECK(fd >= 0);
    return fd;
}
// Allocate device memory with pages of this size (0: the default of the device). Return its handle, or 0 with errno.
inline u64 allocate(int fd, u64 size_bytes, u64 page_bytes = 0) {
    return call_library<u64>("hlthunk_device_memory_alloc", fd, size_bytes, page_bytes, true /* contiguous */,
                             false /* shared */);
}
// Map allocated memory into the address space of the device. Return its device address, or 0 with errno.
inline u64 map_memory(int fd, u64 handle, u64 address_hint = 0) {
    return call_library<u64>("hlthunk_device_memory_map", fd, handle, address_hint);
}
inline int unmap_memory(int fd, u64 address) {
    return call_library("hlthunk_memory_unmap", fd, address);
}
inline int free_memory(int fd, u64 handle) {
    return call_library("hlthunk_device_memory_free", fd, handle);
}
// Export the memory at a mapped device address, or at a physical address of the first Gaudi, as a dma-buf. Return its
// file descriptor or a negative errno value.
inline int export_mapped(int fd, u64 address, u64 size_bytes, u64 offset = 0, std::uint32_t flags = export_flags) {
    return call_library("hlthunk_device_mapped_memory_export_dmabuf_fd", fd, address, size_bytes, offset, flags);
}
inline int export_physical(int fd, u64 address, u64 size_bytes) {
    return call_library("hlthunk_device_memory_export_dmabuf_fd", fd, address, size_bytes, export_flags);
}
// Return the address at which the device accesses the host memory, or 0 with errno.
inline u64 map_host(int fd, void* memory, u64 size_bytes) {
    return call_library<u64>("hlthunk_host_memory_map", fd, memory, u64{0}, size_bytes);
}

// Submit one packet with the method of Gaudi2 and later: the packet is in host memory that is mapped for the device.
// `packet_address` is its device address. Return the sequence number of the submission.
inline u64 submit_mapped(int fd, LinearDma* packet, u64 packet_address, unsigned queue_index = 0) {
    Chunk chunk{packet_address, queue_index, sizeof *packet, chunk_flag_user_buffer, 0, {}};
    SubmissionIn in{nullptr, &chunk, 0, 1, 0};
    SubmissionOut out{};
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) == 0);
    return out.seq;
}
// Wait until the submission ends, and store its WaitStatus. Return 0 or a negative errno value.
inline int wait_for_submission(int fd, u64 sequence, std::uint32_t* status, u64 timeout_us = 30'000'000) {
    return call_library("hlthunk_wait_for_cs", fd, sequence, timeout_us, status);
}

// Return the JSON text with the numbers of handles, exports and devices that the twin holds.
inline std::string read_ledger() {
    std::string text(1 << 20, '\0');
    const int length_bytes = call_library("gdrkit_twin_ledger", text.data(), text.size());
    CHECK(length_bytes > 0 && static_cast<std::size_t>(length_bytes) < text.size());
    text.resize(static_cast<std::size_t>(length_bytes));
    return text;
}

} // namespace gdrkit::twin::gaudi
