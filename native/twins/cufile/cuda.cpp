// Implements access to the CUDA driver by dlopen and dlsym.

#include "cufile/cuda.hpp"

#include <dlfcn.h>

#include <mutex>

#include "cufile/entry.hpp"

namespace gdrkit::twin::cufile {
namespace {

constexpr int attribute_context = 1;        // CU_POINTER_ATTRIBUTE_CONTEXT
constexpr int attribute_memory_type = 2;    // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int attribute_buffer_id = 7;      // CU_POINTER_ATTRIBUTE_BUFFER_ID
constexpr int attribute_device_ordinal = 9; // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr unsigned memory_type_device = 2;  // CU_MEMORYTYPE_DEVICE
constexpr int cuda_not_initialized = 3;     // CUDA_ERROR_NOT_INITIALIZED
constexpr int cuda_invalid_context = 201;   // CUDA_ERROR_INVALID_CONTEXT
constexpr unsigned stream_non_blocking = 1; // CU_STREAM_NON_BLOCKING

using u64 = std::uint64_t;

// The functions of libcuda that this library calls. Contexts, streams and device addresses are of type u64.
struct CudaDriver {
    int (*cuInit)(unsigned) = nullptr;
    int (*cuDeviceGetCount)(int*) = nullptr;
    int (*cuDeviceGetUuid_v2)(void*, int) = nullptr;
    int (*cuPointerGetAttribute)(void*, int, u64) = nullptr;
    int (*cuMemGetAddressRange_v2)(u64*, std::size_t*, u64) = nullptr;
    int (*cuDevicePrimaryCtxRetain)(u64*, int) = nullptr;
    int (*cuDevicePrimaryCtxRelease_v2)(int) = nullptr;
    int (*cuCtxGetCurrent)(u64*) = nullptr;
    int (*cuCtxPushCurrent_v2)(u64) = nullptr;
    int (*cuCtxPopCurrent_v2)(u64*) = nullptr;
    int (*cuStreamCreate)(u64*, unsigned) = nullptr;
    int (*cuStreamDestroy_v2)(u64) = nullptr;
    int (*cuStreamSynchronize)(u64) = nullptr;
    int (*cuStreamGetFlags)(u64, unsigned*) = nullptr;
    int (*cuLaunchHostFunc)(u64, void (*)(void*), void*) = nullptr;
    int (*cuMemcpyHtoDAsync_v2)(u64, const void*, std::size_t, u64) = nullptr;
    int (*cuMemcpyDtoHAsync_v2)(void*, u64, std::size_t, u64) = nullptr;
};

template <typename Function> bool find_symbol(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    return *function != nullptr;
}

bool resolve_symbols(void* library, CudaDriver* driver) {
    return find_symbol(library, "cuInit", &driver->cuInit) &&
           find_symbol(library, "cuDeviceGetCount", &driver->cuDeviceGetCount) &&
           find_symbol(library, "cuDeviceGetUuid_v2", &driver->cuDeviceGetUuid_v2) &&
           find_symbol(library, "cuPointerGetAttribute", &driver->cuPointerGetAttribute) &&
           find_symbol(library, "cuMemGetAddressRange_v2", &driver->cuMemGetAddressRange_v2) &&
           find_symbol(library, "cuDevicePrimaryCtxRetain", &driver->cuDevicePrimaryCtxRetain) &&
           find_symbol(library, "cuDevicePrimaryCtxRelease_v2", &driver->cuDevicePrimaryCtxRelease_v2) &&
           find_symbol(library, "cuCtxGetCurrent", &driver->cuCtxGetCurrent) &&
           find_symbol(library, "cuCtxPushCurrent_v2", &driver->cuCtxPushCurrent_v2) &&
           find_symbol(library, "cuCtxPopCurrent_v2", &driver->cuCtxPopCurrent_v2) &&
           find_symbol(library, "cuStreamCreate", &driver->cuStreamCreate) &&
           find_symbol(library, "cuStreamDestroy_v2", &driver->cuStreamDestroy_v2) &&
           find_symbol(library, "cuStreamSynchronize", &driver->cuStreamSynchronize) &&
           find_symbol(library, "cuStreamGetFlags", &driver->cuStreamGetFlags) &&
           find_symbol(library, "cuLaunchHostFunc", &driver->cuLaunchHostFunc) &&
           find_symbol(library, "cuMemcpyHtoDAsync_v2", &driver->cuMemcpyHtoDAsync_v2) &&
           find_symbol(library, "cuMemcpyDtoHAsync_v2", &driver->cuMemcpyDtoHAsync_v2);
}

// Return the functions of this process's libcuda. The library is opened once; a failed attempt is repeated at the next
// call.
const CudaDriver& cuda() {
    static std::mutex mutex;
    static const CudaDriver* driver = nullptr;
    std::lock_guard lock(mutex);
    if (driver == nullptr) {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        auto* const loaded_driver = new CudaDriver;
        if (library == nullptr || !resolve_symbols(library, loaded_driver)) {
            delete loaded_driver;
            throw CufileError{cuda_driver_error, cuda_not_initialized};
        }
        driver = loaded_driver;
    }
    return *driver;
}

void check_result(int result) {
    if (result != 0) {
        throw CufileError{cuda_driver_error, result};
    }
}

template <typename Value> bool get_attribute(u64 address, int attribute, Value* value) {
    return cuda().cuPointerGetAttribute(value, attribute, address) == 0;
}

} // namespace

std::vector<std::array<std::uint8_t, 16>> initialize_cuda() {
    int device_count = 0;
    check_result(cuda().cuInit(0));
    check_result(cuda().cuDeviceGetCount(&device_count));
    std::vector<std::array<std::uint8_t, 16>> device_uuids(static_cast<std::size_t>(device_count));
    for (int device = 0; device < device_count; ++device) {
        check_result(cuda().cuDeviceGetUuid_v2(device_uuids[static_cast<std::size_t>(device)].data(), device));
    }
    return device_uuids;
}

MemoryLocation find_location(u64 address) {
    MemoryLocation location;
    unsigned memory_type = 0;
    if (!get_attribute(address, attribute_memory_type, &memory_type) || memory_type != memory_type_device) {
        return location;
    }
    location.is_device = true;
    if (!get_attribute(address, attribute_device_ordinal, &location.device_ordinal)) {
        throw CufileError{cuda_pointer_invalid};
    }
    get_attribute(address, attribute_buffer_id, &location.buffer_id);
    if (!get_attribute(address, attribute_context, &location.context)) {
        location.context = 0;
    }
    return location;
}

bool has_current_context() {
    u64 context = 0;
    return cuda().cuCtxGetCurrent(&context) == 0 && context != 0;
}

void require_current_context(const MemoryLocation& location) {
    if (location.is_device && !has_current_context()) {
        throw CufileError{cuda_driver_error, cuda_invalid_context};
    }
}

void check_allocated(u64 address, std::size_t length_bytes) {
    if (length_bytes == 0) {
        return;
    }
    const MemoryLocation location = find_location(address);
    if (!location.is_device) {
        throw CufileError{cuda_pointer_range_error};
    }
    // The driver reports ranges only to a thread with a current context. The threads of this library have none.
    const ScopedContext scoped_context(location);
    // Check one mapping after the other: a program can place several mappings side by side with cuMemMap and use them
    // as one range, but for an address the driver reports only the range of its mapping.
    const u64 end = address + length_bytes;
    while (address < end) {
        u64 base = 0;
        std::size_t size_bytes = 0;
        if (cuda().cuMemGetAddressRange_v2(&base, &size_bytes, address) != 0 || address < base ||
            address - base >= size_bytes) {
            throw CufileError{cuda_pointer_range_error};
        }
        address = base + size_bytes;
    }
}

MemoryLocation find_location_of_stream(Stream stream) {
    int device_count = 0;
    check_result(cuda().cuDeviceGetCount(&device_count));
    for (int device = 0; device < device_count; ++device) {
        const MemoryLocation location{true, device, 0, 0};
        const ScopedContext scoped_context(location);
        unsigned flags = 0;
        if (cuda().cuStreamGetFlags(stream, &flags) == 0) {
            return location;
        }
    }
    throw CufileError{invalid_value};
}

void launch_host_function(const MemoryLocation& location, Stream stream, void (*function)(void*), void* argument) {
    const ScopedContext scoped_context(location);
    check_result(cuda().cuLaunchHostFunc(stream, function, argument));
}

ScopedContext::ScopedContext(const MemoryLocation& location) {
    const CudaDriver& driver = cuda();
    u64 context = location.context;
    if (context == 0) {
        check_result(driver.cuDevicePrimaryCtxRetain(&context, location.device_ordinal));
        retained_device_ = location.device_ordinal;
    }
    if (const int result = driver.cuCtxPushCurrent_v2(context); result != 0) {
        if (retained_device_ >= 0) {
            driver.cuDevicePrimaryCtxRelease_v2(retained_device_);
        }
        throw CufileError{cuda_driver_error, result};
    }
}

ScopedContext::~ScopedContext() {
    u64 context = 0;
    cuda().cuCtxPopCurrent_v2(&context);
    if (retained_device_ >= 0) {
        cuda().cuDevicePrimaryCtxRelease_v2(retained_device_);
    }
}

DeviceCopier::DeviceCopier(const MemoryLocation& location) : scoped_context_(location) {
    check_result(cuda().cuStreamCreate(&stream_, stream_non_blocking));
}

DeviceCopier::~DeviceCopier() {
    cuda().cuStreamSynchronize(stream_);
    cuda().cuStreamDestroy_v2(stream_);
}

void DeviceCopier::copy_to_device(u64 target, const void* source, std::size_t length_bytes) const {
    check_result(cuda().cuMemcpyHtoDAsync_v2(target, source, length_bytes, stream_));
    check_result(cuda().cuStreamSynchronize(stream_));
}

void DeviceCopier::copy_from_device(void* target, u64 source, std::size_t length_bytes) const {
    check_result(cuda().cuMemcpyDtoHAsync_v2(target, source, length_bytes, stream_));
    check_result(cuda().cuStreamSynchronize(stream_));
}

} // namespace gdrkit::twin::cufile
