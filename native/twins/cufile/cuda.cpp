#include "cufile/cuda.hpp"

#include <dlfcn.h>

#include <mutex>

#include "cufile/entry.hpp"

namespace gdrkit::twin::cufile {
namespace {

// CUpointer_attribute and CUmemorytype.
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

template <typename Function> bool find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    return *function != nullptr;
}

bool resolve(void* library, Driver* driver) {
    return find(library, "cuInit", &driver->cuInit) && find(library, "cuDeviceGetCount", &driver->cuDeviceGetCount) &&
           find(library, "cuDeviceGetUuid_v2", &driver->cuDeviceGetUuid_v2) &&
           find(library, "cuPointerGetAttribute", &driver->cuPointerGetAttribute) &&
           find(library, "cuMemGetAddressRange_v2", &driver->cuMemGetAddressRange_v2) &&
           find(library, "cuDevicePrimaryCtxRetain", &driver->cuDevicePrimaryCtxRetain) &&
           find(library, "cuDevicePrimaryCtxRelease_v2", &driver->cuDevicePrimaryCtxRelease_v2) &&
           find(library, "cuCtxGetCurrent", &driver->cuCtxGetCurrent) &&
           find(library, "cuCtxPushCurrent_v2", &driver->cuCtxPushCurrent_v2) &&
           find(library, "cuCtxPopCurrent_v2", &driver->cuCtxPopCurrent_v2) &&
           find(library, "cuStreamCreate", &driver->cuStreamCreate) &&
           find(library, "cuStreamDestroy_v2", &driver->cuStreamDestroy_v2) &&
           find(library, "cuStreamSynchronize", &driver->cuStreamSynchronize) &&
           find(library, "cuStreamGetFlags", &driver->cuStreamGetFlags) &&
           find(library, "cuLaunchHostFunc", &driver->cuLaunchHostFunc) &&
           find(library, "cuMemcpyHtoDAsync_v2", &driver->cuMemcpyHtoDAsync_v2) &&
           find(library, "cuMemcpyDtoHAsync_v2", &driver->cuMemcpyDtoHAsync_v2);
}

// The driver of this process; opened once, and tried again while there is none.
const Driver& cuda() {
    static std::mutex mutex;
    static const Driver* driver = nullptr;
    std::lock_guard lock(mutex);
    if (driver == nullptr) {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        auto* const found = new Driver;
        if (library == nullptr || !resolve(library, found)) {
            delete found;
            throw Refused{cuda_driver_error, cuda_not_initialized};
        }
        driver = found;
    }
    return *driver;
}

void check(int result) {
    if (result != 0) {
        throw Refused{cuda_driver_error, result};
    }
}

template <typename Value> bool attribute(u64 address, int which, Value* value) {
    return cuda().cuPointerGetAttribute(value, which, address) == 0;
}

} // namespace

std::vector<std::array<std::uint8_t, 16>> open_cuda() {
    int count = 0;
    check(cuda().cuInit(0));
    check(cuda().cuDeviceGetCount(&count));
    std::vector<std::array<std::uint8_t, 16>> uuids(static_cast<std::size_t>(count));
    for (int device = 0; device < count; ++device) {
        check(cuda().cuDeviceGetUuid_v2(uuids[static_cast<std::size_t>(device)].data(), device));
    }
    return uuids;
}

Place place_of(u64 address) {
    Place place;
    unsigned type = 0;
    if (!attribute(address, attribute_memory_type, &type) || type != memory_type_device) {
        return place;
    }
    place.device = true;
    if (!attribute(address, attribute_device_ordinal, &place.ordinal)) {
        throw Refused{cuda_pointer_invalid};
    }
    attribute(address, attribute_buffer_id, &place.buffer_id);
    if (!attribute(address, attribute_context, &place.context)) {
        place.context = 0;
    }
    return place;
}

bool has_current_context() {
    u64 context = 0;
    return cuda().cuCtxGetCurrent(&context) == 0 && context != 0;
}

void require_current_context(const Place& place) {
    if (place.device && !has_current_context()) {
        throw Refused{cuda_driver_error, cuda_invalid_context};
    }
}

void check_allocated(u64 address, std::size_t length_bytes) {
    if (length_bytes == 0) {
        return;
    }
    const Place place = place_of(address);
    if (!place.device) {
        throw Refused{cuda_pointer_range_error};
    }
    // The driver tells ranges only where a context is current, which it is not on a thread of this library.
    const InContext in_context(place);
    // Chunk by chunk: memory of the virtual memory calls is one range for the program and several for the driver.
    const u64 end = address + length_bytes;
    while (address < end) {
        u64 base = 0;
        std::size_t size = 0;
        if (cuda().cuMemGetAddressRange_v2(&base, &size, address) != 0 || address < base || address - base >= size) {
            throw Refused{cuda_pointer_range_error};
        }
        address = base + size;
    }
}

Place place_of_stream(Stream stream) {
    int count = 0;
    check(cuda().cuDeviceGetCount(&count));
    for (int device = 0; device < count; ++device) {
        const Place place{true, device, 0, 0};
        const InContext in_context(place);
        unsigned flags = 0;
        if (cuda().cuStreamGetFlags(stream, &flags) == 0) {
            return place;
        }
    }
    throw Refused{invalid_value};
}

void launch_on(const Place& place, Stream stream, void (*function)(void*), void* data) {
    const InContext in_context(place);
    check(cuda().cuLaunchHostFunc(stream, function, data));
}

InContext::InContext(const Place& place) {
    const Driver& driver = cuda();
    u64 context = place.context;
    if (context == 0) {
        check(driver.cuDevicePrimaryCtxRetain(&context, place.ordinal));
        primary_of_ = place.ordinal;
    }
    if (const int result = driver.cuCtxPushCurrent_v2(context); result != 0) {
        if (primary_of_ >= 0) {
            driver.cuDevicePrimaryCtxRelease_v2(primary_of_);
        }
        throw Refused{cuda_driver_error, result};
    }
}

InContext::~InContext() {
    u64 context = 0;
    cuda().cuCtxPopCurrent_v2(&context);
    if (primary_of_ >= 0) {
        cuda().cuDevicePrimaryCtxRelease_v2(primary_of_);
    }
}

Copier::Copier(const Place& place) : in_context_(place) {
    check(cuda().cuStreamCreate(&stream_, stream_non_blocking));
}

Copier::~Copier() {
    cuda().cuStreamSynchronize(stream_);
    cuda().cuStreamDestroy_v2(stream_);
}

void Copier::to_device(u64 to, const void* from, std::size_t length_bytes) const {
    check(cuda().cuMemcpyHtoDAsync_v2(to, from, length_bytes, stream_));
    check(cuda().cuStreamSynchronize(stream_));
}

void Copier::from_device(void* to, u64 from, std::size_t length_bytes) const {
    check(cuda().cuMemcpyDtoHAsync_v2(to, from, length_bytes, stream_));
    check(cuda().cuStreamSynchronize(stream_));
}

} // namespace gdrkit::twin::cufile
