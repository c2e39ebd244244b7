// Names and descriptions of the CUDA 13 error codes: cuGetErrorName and cuGetErrorString.
#include <algorithm>

#include "cuda/entry.hpp"

namespace gdrkit::twin::cuda {
namespace {

struct ErrorText {
    int code;
    const char* name;
    const char* description;
};

constexpr ErrorText error_texts[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {5, "CUDA_ERROR_PROFILER_DISABLED", "profiler disabled"},
    {6, "CUDA_ERROR_PROFILER_NOT_INITIALIZED", "profiler not initialized"},
    {7, "CUDA_ERROR_PROFILER_ALREADY_STARTED", "profiler already started"},
    {8, "CUDA_ERROR_PROFILER_ALREADY_STOPPED", "profiler already stopped"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "the library is a stub"},
    {36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "the call needs a newer driver"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "device is unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {102, "CUDA_ERROR_DEVICE_NOT_LICENSED", "device is not licensed"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "invalid device image"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {202, "CUDA_ERROR_CONTEXT_ALREADY_CURRENT", "context is already current"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping failed"},
    {206, "CUDA_ERROR_UNMAP_FAILED", "unmapping failed"},
    {207, "CUDA_ERROR_ARRAY_IS_MAPPED", "array is mapped"},
    {208, "CUDA_ERROR_ALREADY_MAPPED", "resource is already mapped"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for this device"},
    {210, "CUDA_ERROR_ALREADY_ACQUIRED", "resource is already acquired"},
    {211, "CUDA_ERROR_NOT_MAPPED", "resource is not mapped"},
    {212, "CUDA_ERROR_NOT_MAPPED_AS_ARRAY", "resource is not mapped as array"},
    {213, "CUDA_ERROR_NOT_MAPPED_AS_POINTER", "resource is not mapped as pointer"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error"},
    {215, "CUDA_ERROR_UNSUPPORTED_LIMIT", "limit is not supported"},
    {216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE", "context is already in use"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {218, "CUDA_ERROR_INVALID_PTX", "invalid PTX"},
    {219, "CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", "invalid graphics context"},
    {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error"},
    {221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX compiler not found"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "PTX version is not supported"},
    {223, "CUDA_ERROR_JIT_COMPILATION_DISABLED", "PTX compilation is disabled"},
    {224, "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", "execution affinity is not supported"},
    {225, "CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", "device-side synchronisation is not supported"},
    {226, "CUDA_ERROR_CONTAINED", "error was contained"},
    {300, "CUDA_ERROR_INVALID_SOURCE", "invalid kernel source"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", "shared object symbol not found"},
    {303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "shared object initialization failed"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "object is in an illegal state"},
    {402, "CUDA_ERROR_LOSSY_QUERY", "query would lose information"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "launch timed out"},
    {703, "CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", "launch with incompatible texturing"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "primary context is active"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {711, "CUDA_ERROR_TOO_MANY_PEERS", "too many peers"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "illegal instruction"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not allowed in this address space"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "tensor memory was not released"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not ready"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "driver and other software do not match"},
    {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility is not supported on this device"},
    {805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "connection to the MPS server failed"},
    {806, "CUDA_ERROR_MPS_RPC_FAILURE", "remote call to the MPS server failed"},
    {807, "CUDA_ERROR_MPS_SERVER_NOT_READY", "MPS server is not ready"},
    {808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "no more MPS clients are allowed"},
    {809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", "no more MPS connections are allowed"},
    {810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", "MPS client was terminated"},
    {811, "CUDA_ERROR_CDP_NOT_SUPPORTED", "dynamic parallelism is not supported"},
    {812, "CUDA_ERROR_CDP_VERSION_MISMATCH", "versions for dynamic parallelism do not match"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted while a stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "capture was invalidated"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "captures would be merged"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not begun in this stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capture has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency would cross the capture"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "implicit dependency on a capturing stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "event was recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture was begun by another thread"},
    {909, "CUDA_ERROR_TIMEOUT", "wait timed out"},
    {910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", "graph update violates its constraints"},
    {911, "CUDA_ERROR_EXTERNAL_DEVICE", "error outside of the device"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "cluster is misconfigured"},
    {913, "CUDA_ERROR_FUNCTION_NOT_LOADED", "function is not loaded"},
    {914, "CUDA_ERROR_INVALID_RESOURCE_TYPE", "invalid resource type"},
    {915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "invalid resource configuration"},
    {916, "CUDA_ERROR_KEY_ROTATION", "key rotation is under way"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

Result find_error_text(int code, const char** text, const char* ErrorText::*member) {
    if (text == nullptr) {
        return invalid_value;
    }
    const auto* const entry = std::ranges::find(error_texts, code, &ErrorText::code);
    *text = entry == std::end(error_texts) ? nullptr : entry->*member;
    return *text == nullptr ? invalid_value : success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuGetErrorName(int code, const char** text) {
    return run_entry_before_init("cuGetErrorName", [&] { return find_error_text(code, text, &ErrorText::name); });
}

GDRKIT_CUDA_ENTRY Result cuGetErrorString(int code, const char** text) {
    return run_entry_before_init("cuGetErrorString",
                                 [&] { return find_error_text(code, text, &ErrorText::description); });
}

} // namespace gdrkit::twin::cuda
