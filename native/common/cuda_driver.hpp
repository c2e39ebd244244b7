// The CUDA driver API as a table of function pointers, for all native parts. The build needs no CUDA header. dlopen
// loads libcuda at the first use, so a program starts even if libcuda is not installed. The types are declared here
// from the public documentation.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace gdrkit::cuda {

// The type CUresult. A driver may also return numbers that are not listed here.
using Result = int;
inline constexpr Result success = 0;
inline constexpr Result invalid_value = 1;
inline constexpr Result out_of_memory = 2;
inline constexpr Result no_device = 100;
inline constexpr Result invalid_device = 101;
inline constexpr Result not_ready = 600;
inline constexpr Result not_supported = 801;

using Device = std::int32_t;
using DevicePointer = std::uint64_t;
using Context = void*;
using Stream = void*;
using Event = void*;
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
    device_flush_writes_options = 117, // If bit 0 (..._OPTION_HOST) is set, cuFlushGPUDirectRDMAWrites works.
    device_writes_ordering = 118,      // With at least writes_ordering_owner, the GPU sees NIC writes without a flush.
};
inline constexpr int compute_mode_prohibited = 2; // CU_COMPUTEMODE_PROHIBITED
inline constexpr int writes_ordering_owner = 100; // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER

enum PointerAttribute : int {
    pointer_context = 1,
    pointer_memory_type = 2,
    pointer_sync_memops = 6,
    pointer_buffer_id = 7,
    pointer_is_managed = 8,
    pointer_device_ordinal = 9,
};
enum MemoryType : std::uint32_t { memory_host = 1, memory_device = 2 };

inline constexpr int range_handle_dmabuf = 1;              // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
inline constexpr unsigned ipc_lazy_enable_peer_access = 1; // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr unsigned context_sync_memops = 0x80;      // CU_CTX_SYNC_MEMOPS
inline constexpr int flush_current_context = 0;            // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
inline constexpr int flush_to_owner = 100;                 // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
inline constexpr unsigned stream_non_blocking = 1;         // CU_STREAM_NON_BLOCKING
inline constexpr unsigned event_blocking_sync = 1;         // CU_EVENT_BLOCKING_SYNC
inline constexpr unsigned event_disable_timing = 2;        // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned host_register_portable = 1;      // CU_MEMHOSTREGISTER_PORTABLE

// The columns are: member of Driver, name and CUDA version for cuGetProcAddress, exported symbol, whether the function
// is required, and its signature. If the signature of a name changed between CUDA versions, the version selects the
// signature in the table.
#define GDRKIT_CUDA_FUNCTIONS(X)                                                                                       \
    X(init, "cuInit", 2000, "cuInit", true, Result (*)(unsigned))                                                      \
    X(device_count, "cuDeviceGetCount", 2000, "cuDeviceGetCount", true, Result (*)(int*))                              \
    X(device_get, "cuDeviceGet", 2000, "cuDeviceGet", true, Result (*)(Device*, int))                                  \
    X(device_attribute, "cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute", true, Result (*)(int*, int, Device))     \
    X(device_uuid, "cuDeviceGetUuid", 9020, "cuDeviceGetUuid", true, Result (*)(Uuid*, Device))                        \
    X(primary_retain, "cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain", true,                              \
      Result (*)(Context*, Device))                                                                                    \
    X(primary_release, "cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2", true, Result (*)(Device))   \
    X(context_push, "cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2", true, Result (*)(Context))                        \
    X(context_pop, "cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2", true, Result (*)(Context*))                          \
    X(context_set, "cuCtxSetCurrent", 4000, "cuCtxSetCurrent", true, Result (*)(Context))                              \
    X(context_flags, "cuCtxGetFlags", 7000, "cuCtxGetFlags", true, Result (*)(unsigned*))                              \
    X(context_set_flags, "cuCtxSetFlags", 12010, "cuCtxSetFlags", false, Result (*)(unsigned))                         \
    X(context_synchronize, "cuCtxSynchronize", 2000, "cuCtxSynchronize", true, Result (*)())                           \
    X(stream_create, "cuStreamCreate", 2000, "cuStreamCreate", true, Result (*)(Stream*, unsigned))                    \
    X(stream_destroy, "cuStreamDestroy", 4000, "cuStreamDestroy_v2", true, Result (*)(Stream))                         \
    X(stream_synchronize, "cuStreamSynchronize", 2000, "cuStreamSynchronize", true, Result (*)(Stream))                \
    X(event_create, "cuEventCreate", 2000, "cuEventCreate", true, Result (*)(Event*, unsigned))                        \
    X(event_destroy, "cuEventDestroy", 4000, "cuEventDestroy_v2", true, Result (*)(Event))                             \
    X(event_record, "cuEventRecord", 2000, "cuEventRecord", true, Result (*)(Event, Stream))                           \
    X(event_query, "cuEventQuery", 2000, "cuEventQuery", true, Result (*)(Event))                                      \
    X(event_synchronize, "cuEventSynchronize", 2000, "cuEventSynchronize", true, Result (*)(Event))                    \
    X(host_register, "cuMemHostRegister", 6050, "cuMemHostRegister_v2", true,                                          \
      Result (*)(void*, std::size_t, unsigned))                                                                        \
    X(host_unregister, "cuMemHostUnregister", 4000, "cuMemHostUnregister", true, Result (*)(void*))                    \
    X(copy_to_device, "cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2", true,                                         \
      Result (*)(DevicePointer, const void*, std::size_t, Stream))                                                     \
    X(copy_to_host, "cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2", true,                                           \
      Result (*)(void*, DevicePointer, std::size_t, Stream))                                                           \
    X(allocate, "cuMemAlloc", 3020, "cuMemAlloc_v2", true, Result (*)(DevicePointer*, std::size_t))                    \
    X(free, "cuMemFree", 3020, "cuMemFree_v2", true, Result (*)(DevicePointer))                                        \
    X(fill, "cuMemsetD8", 3020, "cuMemsetD8_v2", true, Result (*)(DevicePointer, unsigned char, std::size_t))          \
    X(memory_info, "cuMemGetInfo", 3020, "cuMemGetInfo_v2", true, Result (*)(std::size_t*, std::size_t*))              \
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

// Pointers to all functions of the table. A function that is not required is null if the driver is too old for it.
struct Driver {
#define GDRKIT_CUDA_MEMBER(member, name, version, symbol, required, ...)                                               \
    using member##_function = __VA_ARGS__;                                                                             \
    member##_function member = nullptr;
    GDRKIT_CUDA_FUNCTIONS(GDRKIT_CUDA_MEMBER)
#undef GDRKIT_CUDA_MEMBER
};

// Returns the name of a result (CUDA_ERROR_...), or "unknown".
inline const char* result_name(const Driver& driver, Result result) noexcept {
    const char* name = nullptr;
    return driver.error_name(result, &name) == success && name != nullptr ? name : "unknown";
}

// The step at which load() failed, and its error.
struct LoadFailure {
    enum class Step { open_library, find_function, initialize } step;
    std::string library_error; // Message of dlopen.
    const char* function_name; // Name of the missing function.
    Result result;             // Result of cuInit.
};

namespace detail {

using GetProcAddress = Result (*)(const char*, void**, int, std::uint64_t, int*);

// Returns the address of a function, or null if this driver does not have it.
inline void* find_function(void* library, GetProcAddress get_proc_address, const char* name, int version,
                           const char* symbol) {
    // Drivers before CUDA 12 have no cuGetProcAddress_v2 and export their functions only as symbols.
    if (get_proc_address == nullptr) {
        return dlsym(library, symbol);
    }
    void* function = nullptr;
    constexpr std::uint64_t default_flags = 0; // CU_GET_PROC_ADDRESS_DEFAULT
    return get_proc_address(name, &function, version, default_flags, nullptr) == success ? function : nullptr;
}

} // namespace detail

// Loads the driver and calls cuInit. Returns nothing on success.
inline std::optional<LoadFailure> load(Driver& driver) {
    // The library is never closed, because threads of the driver run its code, and device memory may be in use until
    // the process ends.
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        return LoadFailure{LoadFailure::Step::open_library, dlerror(), "", success};
    }
    const auto get_proc_address = reinterpret_cast<detail::GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
#define GDRKIT_CUDA_RESOLVE(member, name, version, symbol, required, ...)                                              \
    driver.member = reinterpret_cast<Driver::member##_function>(                                                       \
        detail::find_function(library, get_proc_address, name, version, symbol));                                      \
    if (required && driver.member == nullptr) {                                                                        \
        return LoadFailure{LoadFailure::Step::find_function, "", name, success};                                       \
    }
    GDRKIT_CUDA_FUNCTIONS(GDRKIT_CUDA_RESOLVE)
#undef GDRKIT_CUDA_RESOLVE
    if (const Result result = driver.init(0); result != success) {
        return LoadFailure{LoadFailure::Step::initialize, "", "", result};
    }
    return std::nullopt;
}

} // namespace gdrkit::cuda
