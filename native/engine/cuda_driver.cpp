// Loads libcuda.so.1 when the engine first needs it, and converts the results of its functions to exceptions.
#include "engine/cuda_driver.hpp"

#include <atomic>
#include <cerrno>
#include <mutex>

namespace gdrkit::engine::cuda {
namespace {

std::atomic<const Driver*> loaded_driver{nullptr};

const Driver* open_driver() {
    static Driver driver;
    if (const auto load_failure = load(driver)) {
        switch (load_failure->step) {
        case LoadFailure::Step::open_library:
            throw make_kernel_error("dlopen", ENOENT);
        case LoadFailure::Step::find_function:
            throw make_kernel_error(load_failure->function_name, ENOSYS);
        case LoadFailure::Step::initialize:
            throw Error({.api = Api::cuda,
                         .operation = "cuInit",
                         .number = load_failure->result,
                         .name = result_name(driver, load_failure->result)});
        }
    }
    return &driver;
}

} // namespace

const Driver& driver() {
    const Driver* known_driver = loaded_driver.load(std::memory_order_acquire);
    if (known_driver == nullptr) {
        static std::mutex load_mutex;
        const std::lock_guard lock(load_mutex);
        known_driver = loaded_driver.load(std::memory_order_acquire);
        if (known_driver == nullptr) {
            known_driver = open_driver();
            loaded_driver.store(known_driver, std::memory_order_release);
        }
    }
    return *known_driver;
}

Failure make_failure(const char* operation, Result result) {
    return {.api = Api::cuda, .operation = operation, .number = result, .name = result_name(driver(), result)};
}

void check(const char* operation, Result result) {
    if (result != success) {
        throw Error(make_failure(operation, result));
    }
}

} // namespace gdrkit::engine::cuda
