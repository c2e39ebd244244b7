// Finds the CUDA driver that is loaded in this process and queries device pointers.

#include "ibverbs/cuda_driver.hpp"

#include <dlfcn.h>

#include <mutex>

namespace gdrkit::twin::verbs {
namespace {

constexpr int attribute_memory_type = 2;    // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int attribute_buffer_id = 7;      // CU_POINTER_ATTRIBUTE_BUFFER_ID
constexpr int attribute_is_managed = 8;     // CU_POINTER_ATTRIBUTE_IS_MANAGED
constexpr int attribute_device_ordinal = 9; // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr unsigned memory_type_device = 2;  // CU_MEMORYTYPE_DEVICE

template <typename Function> bool find_symbol(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    return *function != nullptr;
}

} // namespace

bool CudaDriver::find_functions(void* library) {
    return find_symbol(library, "cuPointerGetAttribute", &cuPointerGetAttribute) &&
           find_symbol(library, "cuMemGetAddressRange_v2", &cuMemGetAddressRange_v2) &&
           find_symbol(library, "cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain) &&
           find_symbol(library, "cuDevicePrimaryCtxRelease_v2", &cuDevicePrimaryCtxRelease_v2) &&
           find_symbol(library, "cuCtxPushCurrent_v2", &cuCtxPushCurrent_v2) &&
           find_symbol(library, "cuCtxPopCurrent_v2", &cuCtxPopCurrent_v2) &&
           find_symbol(library, "cuStreamCreate", &cuStreamCreate) &&
           find_symbol(library, "cuStreamDestroy_v2", &cuStreamDestroy_v2) &&
           find_symbol(library, "cuStreamSynchronize", &cuStreamSynchronize) &&
           find_symbol(library, "cuMemcpyHtoDAsync_v2", &cuMemcpyHtoDAsync_v2) &&
           find_symbol(library, "cuMemcpyDtoHAsync_v2", &cuMemcpyDtoHAsync_v2);
}

const CudaDriver* CudaDriver::find_loaded() {
    static std::mutex mutex;
    static const CudaDriver* driver = nullptr;
    std::lock_guard lock(mutex);
    if (driver == nullptr) {
        if (void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD)) {
            auto* const candidate = new CudaDriver;
            if (candidate->find_functions(library)) {
                driver = candidate; // the library stays open, so that it is never unloaded
            } else {
                delete candidate;
                dlclose(library);
            }
        }
    }
    return driver;
}

bool CudaDriver::is_device_memory(std::uint64_t address) const {
    unsigned memory_type = 0;
    unsigned is_managed = 0;
    if (cuPointerGetAttribute(&memory_type, attribute_memory_type, address) != 0 || memory_type != memory_type_device) {
        return false;
    }
    return cuPointerGetAttribute(&is_managed, attribute_is_managed, address) != 0 || is_managed == 0;
}

std::optional<int> CudaDriver::find_device_of_address(std::uint64_t address) const {
    int device = -1;
    if (cuPointerGetAttribute(&device, attribute_device_ordinal, address) != 0 || device < 0) {
        return std::nullopt;
    }
    return device;
}

std::optional<std::uint64_t> CudaDriver::query_buffer_id(std::uint64_t address) const {
    unsigned long long buffer_id = 0;
    if (cuPointerGetAttribute(&buffer_id, attribute_buffer_id, address) != 0) {
        return std::nullopt;
    }
    return buffer_id;
}

std::optional<std::uint64_t> CudaDriver::find_allocation_end(std::uint64_t address) const {
    std::uint64_t base = 0;
    std::size_t size_bytes = 0;
    if (cuMemGetAddressRange_v2(&base, &size_bytes, address) != 0 || address < base || address - base >= size_bytes) {
        return std::nullopt;
    }
    return base + size_bytes;
}

} // namespace gdrkit::twin::verbs
