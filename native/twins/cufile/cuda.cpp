// Implements access to the CUDA driver by dlopen and dlsym.

#include "cufile/cuda.hpp"

#include <dlfcn.h>

#include <mutex>

#include "cufile/entry.hpp"

namespace gdrkit::twin::cufile {
namespace {

// Values of CUpointer_attribute and CUmemorytype.
constexpr int attribute_context = 1;
constexpr int attribute_memory_type = 2;
constexpr int attribute_buffer_id = 7;
constexpr int attribute_device_ordinal = 9;
constexpr unsigned memory_type_device = 2;
constexpr int cuda_not_initialized = 3;
constexpr int cuda_invalid_context = 201;
constexpr unsigned stream_non_blocking = 1;

using u64 = std::uint64_t;

struct Driver {
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

bool resolve(void* library, Driver* driver) {
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

// Return the CUDA driver of this process. It is opened once; a failed attempt is repeated at the next call.
const Driver& cuda() {
    static std::mutex mutex;
    static const Driver* driver = nullptr;
    std::lock_guard lock(mutex);
    if (driver == nullptr) {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        auto* const found = new Driver;
        if (library == nullptr || !resolve(library, found)) {
            delete found;
            throw CufileError{cuda_driver_error, cuda_not_initialized};
        }
        driver = found;
    }
    return *driver;
}

void check_result(int result) {
    if (result != 0) {
        throw CufileError{cuda_driver_error, result};
    }
}

template <typename Value> bool get_attribute(u64 address, int index, Value* value) {
    return cuda().cuPointerGetAttribute(value, index, address) == 0;
}

} // namespace

std::vector<std::array<std::uint8_t, 16>> open_cuda() {
    int count = 0;
    check_result(cuda().cuInit(0));
    check_result(cuda().cuDeviceGetCount(&count));
    std::vector<std::array<std::uint8_t, 16>> uuids(static_cast<std::size_t>(count));
    for (int device = 0; device < count; ++device) {
        check_result(cuda().cuDeviceGetUuid_v2(uuids[static_cast<std::size_t>(device)].data(), device));
    }
    return uuids;
}

MemoryLocation location_of(u64 address) {
    MemoryLocation location;
    unsigned type = 0;
    if (!get_attribute(address, attribute_memory_type, &type) || type != memory_type_device) {
        return location;
    }
    location.device = true;
    if (!get_attribute(address, attribute_device_ordinal, &location.ordinal)) {
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
    if (location.device && !has_current_context()) {
        throw CufileError{cuda_driver_error, cuda_invalid_context};
    }
}

void check_allocated(u64 address, std::size_t length_bytes) {
    if (length_bytes == 0) {
        return;
    }
    const MemoryLocation location = location_of(address);
    if (!location.device) {
        throw CufileError{cuda_pointer_range_error};
    }
    // The driver reports ranges only to a thread with a current context, which a thread of this library does not have.
    const ScopedContext scoped_context(location);
    // One mapping at a time: VMM memory may be one range for the program but several for the driver.
    const u64 end = address + length_bytes;
    while (address < end) {
        u64 base = 0;
        std::size_t size = 0;
        if (cuda().cuMemGetAddressRange_v2(&base, &size, address) != 0 || address < base || address - base >= size) {
            throw CufileError{cuda_pointer_range_error};
        }
        address = base + size;
    }
}

MemoryLocation location_of_stream(Stream stream) {
    int count = 0;
    check_result(cuda().cuDeviceGetCount(&count));
    for (int device = 0; device < count; ++device) {
        const MemoryLocation location{true, device, 0, 0};
        const ScopedContext scoped_context(location);
        unsigned flags = 0;
        if (cuda().cuStreamGetFlags(stream, &flags) == 0) {
            return location;
        }
    }
    throw CufileError{invalid_value};
}

void launch_host_function(const MemoryLocation& location, Stream stream, void (*function)(void*), void* data) {
    const ScopedContext scoped_context(location);
    check_result(cuda().cuLaunchHostFunc(stream, function, data));
}

ScopedContext::ScopedContext(const MemoryLocation& location) {
    const Driver& driver = cuda();
    u64 context = location.context;
    if (context == 0) {
        check_result(driver.cuDevicePrimaryCtxRetain(&context, location.ordinal));
        primary_of_ = location.ordinal;
    }
    if (const int result = driver.cuCtxPushCurrent_v2(context); result != 0) {
        if (primary_of_ >= 0) {
            driver.cuDevicePrimaryCtxRelease_v2(primary_of_);
        }
        throw CufileError{cuda_driver_error, result};
    }
}

ScopedContext::~ScopedContext() {
    u64 context = 0;
    cuda().cuCtxPopCurrent_v2(&context);
    if (primary_of_ >= 0) {
        cuda().cuDevicePrimaryCtxRelease_v2(primary_of_);
    }
}

DeviceCopier::DeviceCopier(const MemoryLocation& location) : scoped_context_(location) {
    check_result(cuda().cuStreamCreate(&stream_, stream_non_blocking));
}

DeviceCopier::~DeviceCopier() {
    cuda().cuStreamSynchronize(stream_);
    cuda().cuStreamDestroy_v2(stream_);
}

void DeviceCopier::to_device(u64 to, const void* from, std::size_t length_bytes) const {
    check_result(cuda().cuMemcpyHtoDAsync_v2(to, from, length_bytes, stream_));
    check_result(cuda().cuStreamSynchronize(stream_));
}

void DeviceCopier::from_device(void* to, u64 from, std::size_t length_bytes) const {
    check_result(cuda().cuMemcpyDtoHAsync_v2(to, from, length_bytes, stream_));
    check_result(cuda().cuStreamSynchronize(stream_));
}

} // namespace gdrkit::twin::cufile
