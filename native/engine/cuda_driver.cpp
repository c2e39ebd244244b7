#include "engine/cuda_driver.hpp"

#include <atomic>
#include <cerrno>
#include <mutex>

namespace gdrkit::engine::cuda {
namespace {

std::atomic<const Driver*> opened{nullptr};

const Driver* open_driver() {
    static Driver driver;
    if (const auto failed = load(driver)) {
        switch (failed->step) {
        case LoadFailure::Step::open_library:
            throw kernel_error("dlopen", ENOENT);
        case LoadFailure::Step::find_function:
            throw kernel_error(failed->function, ENOSYS);
        case LoadFailure::Step::initialize:
            throw Error({.api = Api::cuda,
                         .operation = "cuInit",
                         .number = failed->result,
                         .name = result_name(driver, failed->result)});
        }
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
    return {.api = Api::cuda, .operation = operation, .number = result, .name = result_name(driver(), result)};
}

void check(const char* operation, Result result) {
    if (result != success) {
        throw Error(failure(operation, result));
    }
}

} // namespace gdrkit::engine::cuda
