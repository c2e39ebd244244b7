#include "usrbio/client/cuda_driver.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <optional>

#include "usrbio/client/log.hpp"

namespace gdrkit::usrbio::cuda {
namespace {

#ifdef HF3FS_ENABLE_GDR

using GetProcAddress = Result (*)(const char*, void**, int, std::uint64_t, int*);

// Returns the address of a function, or null if this driver does not have it.
void* find_function(void* library, GetProcAddress get, const char* name, int version, const char* symbol) {
    void* function = nullptr;
    if (get != nullptr && get(name, &function, version, 0, nullptr) == success && function != nullptr) {
        return function;
    }
    // Drivers before CUDA 12 export their functions only as symbols.
    return get == nullptr ? dlsym(library, symbol) : nullptr;
}

std::optional<Driver> open_driver() {
    // The library is never closed: the driver has its own threads, and its memory outlives all objects here.
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        log_line(LogLevel::info, "CUDA is not available: dlopen(libcuda.so.1) failed: %s", dlerror());
        return std::nullopt;
    }
    const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
    Driver driver;
#define GDRKIT_CUDA_RESOLVE(member, name, version, symbol, required, ...)                                              \
    driver.member = reinterpret_cast<Driver::member##_function>(find_function(library, get, name, version, symbol));   \
    if (required && driver.member == nullptr) {                                                                        \
        log_line(LogLevel::warning, "CUDA is not available: the driver has no %s of version %d", name, version);       \
        return std::nullopt;                                                                                           \
    }
    GDRKIT_CUDA_FUNCTIONS(GDRKIT_CUDA_RESOLVE)
#undef GDRKIT_CUDA_RESOLVE
    if (const Result result = driver.init(0); result != success) {
        log_line(LogLevel::warning, "CUDA is not available: cuInit() failed: %s (%d)", name_of(driver, result), result);
        return std::nullopt;
    }
    return driver;
}

#else

std::optional<Driver> open_driver() {
    log_line(LogLevel::info, "CUDA is not available: this library was built without ENABLE_GDR");
    return std::nullopt;
}

#endif

} // namespace

const Driver* driver() noexcept {
    static const std::optional<Driver> opened = open_driver();
    return opened ? &*opened : nullptr;
}

int errno_of(Result result) noexcept {
    switch (result) {
    case success:
        return 0;
    case out_of_memory:
        return -ENOMEM;
    case no_device:
    case invalid_device:
        return -ENODEV;
    case not_supported:
        return -ENOTSUP;
    default:
        return -EIO;
    }
}

const char* name_of(const Driver& driver, Result result) noexcept {
    const char* name = nullptr;
    return driver.error_name(result, &name) == success && name != nullptr ? name : "unknown";
}

} // namespace gdrkit::usrbio::cuda
