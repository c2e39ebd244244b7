#include "engine/cuda_driver.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <mutex>

namespace gdrkit::engine::cuda {
namespace {

using GetProcAddress = Result (*)(const char*, void**, int, std::uint64_t, int*);

std::atomic<const Driver*> opened{nullptr};

// Returns the address of a function, or null if this driver does not have it.
void* find_function(void* library, GetProcAddress get, const char* name, int version, const char* symbol) {
    void* function = nullptr;
    if (get != nullptr && get(name, &function, version, 0, nullptr) == success && function != nullptr) {
        return function;
    }
    // Drivers before CUDA 12 export their functions only as symbols.
    return get == nullptr ? dlsym(library, symbol) : nullptr;
}

const Driver* open_driver() {
    // The library is never closed: the driver has its own threads, and its memory outlives all objects here.
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw kernel_error("dlopen", ENOENT);
    }
    const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
    static Driver driver;
#define GDRKIT_ENGINE_RESOLVE(member, name, version, symbol, ...)                                                      \
    driver.member = reinterpret_cast<Driver::member##_function>(find_function(library, get, name, version, symbol));   \
    if (driver.member == nullptr) {                                                                                    \
        throw kernel_error(name, ENOSYS);                                                                              \
    }
    GDRKIT_ENGINE_CUDA(GDRKIT_ENGINE_RESOLVE)
#undef GDRKIT_ENGINE_RESOLVE
    if (const Result result = driver.init(0); result != success) {
        const char* name = nullptr;
        driver.error_name(result, &name);
        throw Error({.api = Api::cuda, .operation = "cuInit", .number = result, .name = name ? name : "unknown"});
    }
    return &driver;
}

} // namespace

const Driver& driver() {
    const Driver* loaded = opened.load(std::memory_order_acquire);
    if (loaded == nullptr) {
        static std::mutex opening;
        const std::lock_guard lock(opening);
        loaded = opened.load(std::memory_order_acquire);
        if (loaded == nullptr) {
            loaded = open_driver();
            opened.store(loaded, std::memory_order_release);
        }
    }
    return *loaded;
}

Failure failure(const char* operation, Result result) {
    const char* name = nullptr;
    driver().error_name(result, &name);
    return {.api = Api::cuda, .operation = operation, .number = result, .name = name != nullptr ? name : "unknown"};
}

void check(const char* operation, Result result) {
    if (result != success) {
        throw Error(failure(operation, result));
    }
}

} // namespace gdrkit::engine::cuda
