// Access to the CUDA driver. dlopen loads libcuda at the first use, so the build needs no CUDA header, and the program
// starts without libcuda. The types are declared here from the public documentation. Each function is looked up at the
// version that has this signature.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio::cuda {

// CUresult. A driver may return any number.
enum Result : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    no_device = 100,
    invalid_device = 101,
    not_supported = 801,
};
static_assert(sizeof(Result) == 4);

using Device = std::int32_t;
using DevicePointer = std::uint64_t;
using Context = void*;
using AllocationHandle = std::uint64_t;
static_assert(sizeof(DevicePointer) == sizeof(void*), "CUdeviceptr is as wide as a pointer");

struct IpcHandle {
    std::uint8_t bytes[64];
};
static_assert(sizeof(IpcHandle) == 64 && alignof(IpcHandle) == 1);

struct Uuid {
    std::uint8_t bytes[16];
};
static_assert(sizeof(Uuid) == 16 && alignof(Uuid) == 1);

enum DeviceAttribute : int {
    device_compute_mode = 20,
    device_unified_addressing = 41,
    device_flush_writes_options = 117, // Bit 0: cuFlushGPUDirectRDMAWrites works.
    device_writes_ordering = 118,      // At 100 and above, the owner sees the writes of a NIC in order without a flush.
};
inline constexpr int compute_mode_prohibited = 2;
inline constexpr int writes_ordering_owner = 100;

enum PointerAttribute : int {
    pointer_context = 1,
    pointer_memory_type = 2,
    pointer_sync_memops = 6,
    pointer_is_managed = 8,
    pointer_device_ordinal = 9,
};
enum MemoryType : std::uint32_t { memory_host = 1, memory_device = 2 };

inline constexpr int range_handle_dmabuf = 1;
inline constexpr unsigned ipc_lazy_enable_peer_access = 1;
inline constexpr unsigned context_sync_memops = 0x80;
inline constexpr int flush_current_context = 0;
inline constexpr int flush_to_owner = 100;

// The columns are: member, name for cuGetProcAddress, version, exported symbol, required, signature.
#define GDRKIT_CUDA_FUNCTIONS(X)                                                                                       \
    X(init, "cuInit", 2000, "cuInit", true, Result (*)(unsigned))                                                      \
    X(device_count, "cuDeviceGetCount", 2000, "cuDeviceGetCount", true, Result (*)(int*))                              \
    X(device_attribute, "cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute", true, Result (*)(int*, int, Device))     \
    X(device_uuid, "cuDeviceGetUuid", 9020, "cuDeviceGetUuid", true, Result (*)(Uuid*, Device))                        \
    X(primary_retain, "cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain", true,                              \
      Result (*)(Context*, Device))                                                                                    \
    X(primary_release, "cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2", true, Result (*)(Device))   \
    X(context_push, "cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2", true, Result (*)(Context))                        \
    X(context_pop, "cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2", true, Result (*)(Context*))                          \
    X(context_flags, "cuCtxGetFlags", 7000, "cuCtxGetFlags", true, Result (*)(unsigned*))                              \
    X(context_set_flags, "cuCtxSetFlags", 12010, "cuCtxSetFlags", false, Result (*)(unsigned))                         \
    X(context_synchronize, "cuCtxSynchronize", 2000, "cuCtxSynchronize", true, Result (*)())                           \
    X(allocate, "cuMemAlloc", 3020, "cuMemAlloc_v2", true, Result (*)(DevicePointer*, std::size_t))                    \
    X(free, "cuMemFree", 3020, "cuMemFree_v2", true, Result (*)(DevicePointer))                                        \
    X(address_range, "cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2", true,                                    \
      Result (*)(DevicePointer*, std::size_t*, DevicePointer))                                                         \
    X(range_handle, "cuMemGetHandleForAddressRange", 11070, "cuMemGetHandleForAddressRange", false,                    \
      Result (*)(void*, DevicePointer, std::size_t, int, unsigned long long))                                          \
    X(pointer_get, "cuPointerGetAttribute", 4000, "cuPointerGetAttribute", true,                                       \
      Result (*)(void*, int, DevicePointer))                                                                           \
    X(pointer_set, "cuPointerSetAttribute", 6000, "cuPointerSetAttribute", true,                                       \
      Result (*)(const void*, int, DevicePointer))                                                                     \
    X(ipc_get, "cuIpcGetMemHandle", 4010, "cuIpcGetMemHandle", true, Result (*)(IpcHandle*, DevicePointer))            \
    X(ipc_open, "cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2", true,                                            \
      Result (*)(DevicePointer*, IpcHandle, unsigned))                                                                 \
    X(ipc_close, "cuIpcCloseMemHandle", 4010, "cuIpcCloseMemHandle", true, Result (*)(DevicePointer))                  \
    X(flush_writes, "cuFlushGPUDirectRDMAWrites", 11030, "cuFlushGPUDirectRDMAWrites", false, Result (*)(int, int))    \
    X(error_name, "cuGetErrorName", 6000, "cuGetErrorName", true, Result (*)(int, const char**))

// Pointers to all functions of the list. Those that are not required are null if the driver is too old.
struct Driver {
#define GDRKIT_CUDA_MEMBER(member, name, version, symbol, required, ...)                                               \
    using member##_function = __VA_ARGS__;                                                                             \
    member##_function member = nullptr;
    GDRKIT_CUDA_FUNCTIONS(GDRKIT_CUDA_MEMBER)
#undef GDRKIT_CUDA_MEMBER
};

// Returns the initialized driver of this process, or null: libcuda.so.1 is not installed or cannot be initialized, or
// the library was built without ENABLE_GDR. The result never changes. The reason for null is logged once.
const Driver* driver() noexcept;

// Converts a result of the driver to -ENOMEM, -ENODEV, -ENOTSUP or -EIO; 0 for success.
int errno_of(Result result) noexcept;

// Returns the name of a result (CUDA_ERROR_...), or "unknown".
const char* name_of(const Driver& driver, Result result) noexcept;

} // namespace gdrkit::usrbio::cuda
