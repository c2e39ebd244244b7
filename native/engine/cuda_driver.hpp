// Access to the CUDA driver. dlopen loads libcuda at the first use, so the build needs no CUDA header, and the program
// starts without libcuda. The types are declared here from the public documentation. Each function is
// looked up at the version that has this signature.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/failure.hpp"

namespace gdrkit::engine::cuda {

using Result = int; // CUresult. A driver may return any number.
inline constexpr Result success = 0;
inline constexpr Result not_ready = 600;

using Device = std::int32_t;
using DevicePointer = std::uint64_t;
using Context = void*;
using Stream = void*;
using Event = void*;
static_assert(sizeof(DevicePointer) == sizeof(void*), "CUdeviceptr is as wide as a pointer");

inline constexpr unsigned stream_non_blocking = 1;
inline constexpr unsigned event_blocking_sync = 1;
inline constexpr unsigned event_disable_timing = 2;
inline constexpr unsigned host_register_portable = 1;
inline constexpr int pointer_device_ordinal = 9;

// The columns are: member, name for cuGetProcAddress, version, exported symbol, signature.
#define GDRKIT_ENGINE_CUDA(X)                                                                                          \
    X(init, "cuInit", 2000, "cuInit", Result (*)(unsigned))                                                            \
    X(device_get, "cuDeviceGet", 2000, "cuDeviceGet", Result (*)(Device*, int))                                        \
    X(device_bus_id, "cuDeviceGetPCIBusId", 4010, "cuDeviceGetPCIBusId", Result (*)(char*, int, Device))               \
    X(primary_retain, "cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain", Result (*)(Context*, Device))      \
    X(primary_release, "cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2", Result (*)(Device))         \
    X(context_push, "cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2", Result (*)(Context))                              \
    X(context_pop, "cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2", Result (*)(Context*))                                \
    X(context_set, "cuCtxSetCurrent", 4000, "cuCtxSetCurrent", Result (*)(Context))                                    \
    X(stream_create, "cuStreamCreate", 2000, "cuStreamCreate", Result (*)(Stream*, unsigned))                          \
    X(stream_destroy, "cuStreamDestroy", 4000, "cuStreamDestroy_v2", Result (*)(Stream))                               \
    X(stream_synchronize, "cuStreamSynchronize", 2000, "cuStreamSynchronize", Result (*)(Stream))                      \
    X(event_create, "cuEventCreate", 2000, "cuEventCreate", Result (*)(Event*, unsigned))                              \
    X(event_destroy, "cuEventDestroy", 4000, "cuEventDestroy_v2", Result (*)(Event))                                   \
    X(event_record, "cuEventRecord", 2000, "cuEventRecord", Result (*)(Event, Stream))                                 \
    X(event_query, "cuEventQuery", 2000, "cuEventQuery", Result (*)(Event))                                            \
    X(event_synchronize, "cuEventSynchronize", 2000, "cuEventSynchronize", Result (*)(Event))                          \
    X(host_register, "cuMemHostRegister", 6050, "cuMemHostRegister_v2", Result (*)(void*, std::size_t, unsigned))      \
    X(host_unregister, "cuMemHostUnregister", 4000, "cuMemHostUnregister", Result (*)(void*))                          \
    X(copy_to_device, "cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2",                                               \
      Result (*)(DevicePointer, const void*, std::size_t, Stream))                                                     \
    X(copy_to_host, "cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2",                                                 \
      Result (*)(void*, DevicePointer, std::size_t, Stream))                                                           \
    X(error_name, "cuGetErrorName", 6000, "cuGetErrorName", Result (*)(int, const char**))

// Pointers to all functions of the list. None of them is null.
struct Driver {
#define GDRKIT_ENGINE_MEMBER(member, name, version, symbol, ...)                                                       \
    using member##_function = __VA_ARGS__;                                                                             \
    member##_function member = nullptr;
    GDRKIT_ENGINE_CUDA(GDRKIT_ENGINE_MEMBER)
#undef GDRKIT_ENGINE_MEMBER
};

// Returns the initialized driver of this process. Throws Error: ENOENT of dlopen, ENOSYS for a missing function, or the
// result of cuInit. A failure is not cached, because a driver may be installed later.
const Driver& driver();

// Returns the failure with its name (CUDA_ERROR_...), or "unknown".
Failure failure(const char* operation, Result result);

// Throws Error unless the call succeeded.
void check(const char* operation, Result result);

} // namespace gdrkit::engine::cuda
