// What the GPU iovs ask of the CUDA driver: contexts, what is behind a pointer, and how memory goes to other processes.
// Functions answer 0 or -errno and log what the driver said.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "usrbio/client/cuda_driver.hpp"
#include "usrbio/client/descriptor.hpp"

namespace gdrkit::usrbio {

using IpcBytes = std::array<std::uint8_t, 64>;

// A reference to the primary context of a device, which the runtime API, torch and others use too.
class PrimaryContext {
public:
    PrimaryContext() = default;
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;
    PrimaryContext(PrimaryContext&& other) noexcept;
    PrimaryContext& operator=(PrimaryContext&& other) noexcept;
    ~PrimaryContext();

    // -ENODEV when there is no such device.
    int retain(const cuda::Driver& driver, int device);
    [[nodiscard]] cuda::Context get() const { return context_; }
    // Forgets it: a forked child has no contexts.
    void abandon() noexcept { driver_ = nullptr; }

private:
    const cuda::Driver* driver_ = nullptr;
    int device_ = -1;
    cuda::Context context_ = nullptr;
};

// Makes a context current in this thread, and what was current before afterwards.
class CurrentContext {
public:
    CurrentContext(const cuda::Driver& driver, cuda::Context context);
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    ~CurrentContext();
    // 0, or -ENODEV: the context cannot be made current.
    [[nodiscard]] int error() const { return error_; }

private:
    const cuda::Driver& driver_;
    int error_ = 0;
};

struct Allocation {
    cuda::DevicePointer base = 0;
    std::size_t bytes = 0;
};

// The context that holds the memory; `fallback` for memory that is of no context (VMM, pools).
cuda::Context context_of(const cuda::Driver& driver, cuda::DevicePointer pointer, cuda::Context fallback);

// Whether the range is memory of this device from its first to its last byte, and in which allocation it begins.
// -EINVAL: host, managed or another device's memory, or less memory than that. A context must be current.
int inspect(const cuda::Driver& driver, int device, cuda::DevicePointer pointer, std::size_t size_bytes,
            Allocation* first);

// Has the driver finish every synchronous copy of this memory before it returns, so that a NIC finds what was copied.
// VMM memory has no such attribute; there the flag of the current context does it for all of its memory.
int synchronize_copies(const cuda::Driver& driver, cuda::DevicePointer pointer);

// The IPC handle of the allocation around the pointer. -ENOTSUP: this kind of memory has none.
int export_ipc(const cuda::Driver& driver, cuda::DevicePointer pointer, IpcBytes* ipc);

struct Dmabuf {
    Descriptor descriptor;
    std::uint64_t size_bytes = 0;
    std::uint64_t offset_bytes = 0; // Where the asked-for bytes begin in it: the driver exports whole pages.
};

// -ENOTSUP: this driver or this kind of memory has no dma-buf.
int export_dmabuf(const cuda::Driver& driver, cuda::DevicePointer pointer, std::size_t size_bytes, Dmabuf* dmabuf);

// Memory of another process, mapped here: its base. The result of the driver, so that callers can tell why not.
cuda::Result open_ipc(const cuda::Driver& driver, const IpcBytes& ipc, cuda::DevicePointer* base);

} // namespace gdrkit::usrbio
