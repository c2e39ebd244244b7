// Wrappers of the CUDA driver for GPU iovs: contexts, checks of the memory at an address, and handles for other
// processes. Unless a comment says otherwise, functions of type int return 0 or -errno, and log an error of the driver.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/descriptor.hpp"
#include "usrbio/client/cuda_driver.hpp"

namespace gdrkit::usrbio {

// The bytes of a CUipcMemHandle, by which another process maps an allocation.
using IpcBytes = std::array<std::uint8_t, 64>;

// A reference to the primary context of a device. The CUDA runtime API and torch use this context too. The context
// exists as long as a reference to it exists.
class PrimaryContext {
public:
    PrimaryContext() = default;
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;
    PrimaryContext(PrimaryContext&& other) noexcept;
    PrimaryContext& operator=(PrimaryContext&& other) noexcept;
    ~PrimaryContext();

    // Takes a reference. Returns 0, -ENOMEM, or -ENODEV if the device does not exist or the driver refuses its context.
    int retain(const cuda::Driver& driver, int device);
    [[nodiscard]] cuda::Context get() const { return context_; }
    // Drops the reference without a call of the driver. Call it in a forked child, where the driver does not work.
    void disown() noexcept { driver_ = nullptr; }

private:
    const cuda::Driver* driver_ = nullptr;
    int device_ = -1;
    cuda::Context context_ = nullptr;
};

// Makes a context current in this thread. The destructor restores the previous context.
class CurrentContext {
public:
    CurrentContext(const cuda::Driver& driver, cuda::Context context);
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    ~CurrentContext();
    // Returns 0, or -ENODEV if the context could not be made current.
    [[nodiscard]] int error() const { return error_; }

private:
    const cuda::Driver& driver_;
    int error_ = 0;
};

// An allocation of device memory, or a chunk of VMM memory.
struct Allocation {
    cuda::DevicePointer base = 0;
    std::size_t bytes = 0;
};

// Returns the context that holds the memory, or `fallback` for memory without a context (memory of cuMemCreate or
// cuMemAllocAsync).
cuda::Context find_context(const cuda::Driver& driver, cuda::DevicePointer pointer, cuda::Context fallback);

// Checks that the whole range is memory of `device`, and sets `allocation` to the allocation that contains the first
// byte. Returns -EINVAL if the range is host memory, managed memory or memory of another device, or extends beyond the
// end of the memory. A context must be current.
int check_device_memory(const cuda::Driver& driver, int device, cuda::DevicePointer pointer, std::size_t size_bytes,
                        Allocation* allocation);

// Sets the attribute SYNC_MEMOPS of this memory: synchronous copies to it then complete before they return, so that a
// NIC reads the copied bytes. VMM memory (cuMemCreate) does not have the attribute. For such memory the function sets
// the flag CU_CTX_SYNC_MEMOPS of the current context, which applies to all memory of the context.
int enable_sync_memops(const cuda::Driver& driver, cuda::DevicePointer pointer);

// Exports the IPC handle of the allocation that contains `pointer`. -ENOTSUP: this type of memory has no IPC handle.
int export_ipc(const cuda::Driver& driver, cuda::DevicePointer pointer, IpcBytes* ipc);

struct Dmabuf {
    Descriptor descriptor;
    std::uint64_t size_bytes = 0; // Size of the dma-buf: the whole pages that contain the range.
    // Offset of the first requested byte in the dma-buf. The driver exports whole pages, so the offset is not 0 if the
    // range does not begin at a page.
    std::uint64_t offset_bytes = 0;
};

// Exports a dma-buf of the range. -ENOTSUP: this driver or this type of memory does not support dma-bufs.
int export_dmabuf(const cuda::Driver& driver, cuda::DevicePointer pointer, std::size_t size_bytes, Dmabuf* dmabuf);

// Finds the device of this process that has the memory of an IPC handle. Tries the device with the number `device_hint`
// first. Returns 0, -ENODEV if this process has no device, or -EINVAL if the driver refuses the handle on every device.
int find_ipc_device(const cuda::Driver& driver, const IpcBytes& ipc, int device_hint, int* device);

// Maps memory of another process and sets `base` to its address. Returns the result of the driver instead of an errno,
// because the callers return different errno values for it.
cuda::Result open_ipc(const cuda::Driver& driver, const IpcBytes& ipc, cuda::DevicePointer* base);

} // namespace gdrkit::usrbio
