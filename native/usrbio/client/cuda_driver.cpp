// Loads the CUDA driver (libcuda.so.1), unless this client library was built without ENABLE_GDR, and converts results
// of the driver to errno values.
#include "usrbio/client/cuda_driver.hpp"

#include <cerrno>
#include <optional>

#include "usrbio/client/log.hpp"

namespace gdrkit::usrbio::cuda {
namespace {

#ifdef HF3FS_ENABLE_GDR

void log_failure(const Driver& driver, const LoadFailure& failure) {
    switch (failure.step) {
    case LoadFailure::Step::open_library:
        log_line(LogLevel::info, "CUDA is not available: dlopen(libcuda.so.1) failed: %s",
                 failure.library_error.c_str());
        break;
    case LoadFailure::Step::find_function:
        log_line(LogLevel::warning, "CUDA is not available: the driver has no %s", failure.function_name);
        break;
    case LoadFailure::Step::initialize:
        log_line(LogLevel::warning, "CUDA is not available: cuInit() failed: %s (%d)",
                 result_name(driver, failure.result), failure.result);
        break;
    }
}

std::optional<Driver> open_driver() {
    Driver driver;
    if (const auto failure = load(driver)) {
        log_failure(driver, *failure);
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
    static const std::optional<Driver> loaded_driver = open_driver();
    return loaded_driver ? &*loaded_driver : nullptr;
}

int convert_to_errno(Result result) noexcept {
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

} // namespace gdrkit::usrbio::cuda
