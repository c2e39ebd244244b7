// Functions of the CUDA driver for GPU iovs: contexts, the memory behind a pointer, and handles for other processes.
// They return 0 or -errno and log the error of the driver.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/descriptor.hpp"
#include "usrbio/client/cuda_driver.hpp"

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

    // Returns -ENODEV if the device does not exist.
    int retain(const cuda::Driver& driver, int device);
    [[nodiscard]] cuda::Context get() const { return context_; }
    // Drops the reference without a call: a forked child has no contexts.
    void disown() noexcept { driver_ = nullptr; }

private:
    const cuda::Driver* driver_ = nullptr;
    int device_ = -1;
    cuda::Context context_ = nullptr;
};

// Makes a context current in this thread, and restores the previous one at the end.
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

// Returns the context that holds the memory; `fallback` for memory without a context (VMM, pools).
cuda::Context find_context(const cuda::Driver& driver, cuda::DevicePointer pointer, cuda::Context fallback);

// Checks that the whole range is memory of this device, and returns the allocation that contains its first byte.
// -EINVAL: it is memory of the host, managed or of another device, or the memory ends earlier. A context must be
// current.
int check_device_memory(const cuda::Driver& driver, int device, cuda::DevicePointer pointer, std::size_t size_bytes,
                        Allocation* allocation);

// Makes synchronous copies of this memory complete before they return, so that a NIC reads what was copied. VMM memory
// has no such attribute; for it, the function sets the flag of the current context, which applies to all of its memory.
int enable_sync_memops(const cuda::Driver& driver, cuda::DevicePointer pointer);

// Exports the IPC handle of the allocation around the pointer. -ENOTSUP: this type of memory has none.
int export_ipc(const cuda::Driver& driver, cuda::DevicePointer pointer, IpcBytes* ipc);

struct Dmabuf {
    Descriptor descriptor;
    std::uint64_t size_bytes = 0;
    // Offset of the exported bytes in the dma-buf, because the driver exports whole pages.
    std::uint64_t offset_bytes = 0;
};

// Exports a dma-buf. -ENOTSUP: this driver or this type of memory does not support it.
int export_dmabuf(const cuda::Driver& driver, cuda::DevicePointer pointer, std::size_t size_bytes, Dmabuf* dmabuf);

// Maps memory of another process and returns its base. Returns the result of the driver, because callers need it.
cuda::Result open_ipc(const cuda::Driver& driver, const IpcBytes& ipc, cuda::DevicePointer* base);

} // namespace gdrkit::usrbio
