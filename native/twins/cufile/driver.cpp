// Implements cuFileDriverOpen, cuFileDriverClose, and the functions for the version and the properties of the driver.

#include "cufile/driver.hpp"

#include <atomic>
#include <mutex>

#include "cufile/buffers.hpp"
#include "cufile/cuda.hpp"
#include "cufile/entry.hpp"
#include "cufile/files.hpp"
#include "cufile/parameters.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"

namespace gdrkit::twin::cufile {
namespace {

// Number of calls of cuFileDriverGetProperties. Such a call makes queued transfers fail (transfer.cpp).
std::atomic<std::uint64_t> properties_call_count = 0;

struct DriverState {
    std::mutex mutex;
    bool is_driver_open = false;
    long use_count = 0;      // calls of cuFileDriverOpen minus calls of cuFileDriverClose
    int operation_count = 0; // number of objects of class OperationInProgress
    CompatSettings compat_settings;
    std::vector<std::array<std::uint8_t, 16>> device_uuids; // of all GPUs; index: ordinal
};

DriverState& driver() {
    static auto* const instance = new DriverState;
    return *instance;
}

// Open the driver unless it is open. The caller holds the lock. Throw CufileError: invalid_value if an environment
// variable or the fault plan is malformed, cuda_driver_error if CUDA cannot be used, driver_not_initialized if no
// transfer would be possible.
void open_driver(DriverState* driver_state) {
    if (!configuration_error().empty()) {
        throw CufileError{invalid_value};
    }
    if (!driver_state->is_driver_open) {
        driver_state->device_uuids = initialize_cuda();
        driver_state->compat_settings = apply_parameters();
        // No transfer of device memory would be possible: compat mode is not allowed, and the fault plan has no rule
        // that enables a direct path.
        if (!driver_state->compat_settings.allow_compat && !FaultSite("cufile.route").has_rule()) {
            throw CufileError{driver_not_initialized};
        }
        driver_state->is_driver_open = true;
    }
}

Error close_driver(std::string_view symbol) {
    return run_entry(symbol, [] {
        DriverState& driver_state = driver();
        std::lock_guard lock(driver_state.mutex);
        if (!driver_state.is_driver_open) {
            throw CufileError{driver_not_initialized};
        }
        if (driver_state.use_count > 1) {
            --driver_state.use_count;
            return;
        }
        if (driver_state.operation_count > 0) {
            throw CufileError{driver_closing};
        }
        // Closing the driver ends all registrations. So the ledger treats a later deregistration as a double release.
        drop_files();
        drop_buffers();
        driver_state.use_count = 0;
        driver_state.is_driver_open = false;
    });
}

// Implement a function such as cuFileDriverSetMaxCacheSize, which sets one parameter. While the driver is open, these
// functions return success and have no effect.
Error set_parameter_if_closed(std::string_view symbol, SizeParameter parameter, std::size_t value) {
    return run_entry(symbol, [&] {
        if (!is_open()) {
            set_size_parameter(parameter, value);
        }
    });
}

} // namespace

void ensure_open() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    open_driver(&driver_state);
}

bool is_open() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    return driver_state.is_driver_open;
}

void require_open_driver() {
    if (!is_open()) {
        throw CufileError{driver_not_initialized};
    }
}

CompatSettings get_compat_settings() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    return driver_state.compat_settings;
}

std::uint64_t count_properties_calls() {
    return properties_call_count;
}

std::vector<std::array<std::uint8_t, 16>> get_device_uuids() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    return driver_state.device_uuids;
}

OperationInProgress::OperationInProgress() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    if (!driver_state.is_driver_open) {
        throw CufileError{driver_not_initialized};
    }
    ++driver_state.operation_count;
}

OperationInProgress::~OperationInProgress() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    --driver_state.operation_count;
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverOpen() {
    return run_entry("cuFileDriverOpen", [] {
        DriverState& driver_state = driver();
        std::lock_guard lock(driver_state.mutex);
        open_driver(&driver_state);
        ++driver_state.use_count;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverClose() {
    return close_driver("cuFileDriverClose");
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverClose_v2() {
    return close_driver("cuFileDriverClose_v2");
}

GDRKIT_CUFILE_ENTRY long cuFileUseCount() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    return driver_state.use_count;
}

GDRKIT_CUFILE_ENTRY Error cuFileGetVersion(int* version) {
    return run_entry("cuFileGetVersion", [&] {
        if (version == nullptr) {
            throw CufileError{invalid_value};
        }
        *version = config().cufile_version;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverGetProperties(DriverProperties* properties) {
    return run_entry("cuFileDriverGetProperties", [&] {
        if (properties == nullptr) {
            throw CufileError{invalid_value};
        }
        ++properties_call_count;
        // Report that nvidia-fs is not loaded: its version is 0.0, and it supports no file systems.
        *properties = {};
        const bool allows_compat =
            is_open() ? get_compat_settings().allow_compat : get_bool_parameter(bool_allow_compat);
        properties->nvfs.poll_threshold_kb = get_size_parameter(size_poll_threshold_kb);
        properties->nvfs.max_direct_io_kb = get_size_parameter(size_max_direct_io_kb);
        properties->nvfs.control_flags = (get_bool_parameter(bool_poll_mode) ? 1U << use_poll_mode_bit : 0U) |
                                         (allows_compat ? 1U << allow_compat_bit : 0U);
        properties->feature_flags = is_open() ? 1U << batch_bit | 1U << streams_bit | 1U << parallel_bit : 0U;
        properties->max_device_cache_kb = static_cast<std::uint32_t>(get_size_parameter(size_max_device_cache_kb));
        properties->per_buffer_cache_kb = static_cast<std::uint32_t>(get_size_parameter(size_per_buffer_cache_kb));
        properties->max_pinned_kb = static_cast<std::uint32_t>(get_size_parameter(size_max_pinned_kb));
        properties->max_batch_io = static_cast<std::uint32_t>(get_size_parameter(size_batch_entries));
        properties->max_batch_timeout_ms = static_cast<std::uint32_t>(get_size_parameter(size_batch_timeout_ms));
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetPollMode(bool use_poll_mode, std::size_t threshold_kb) {
    return run_entry("cuFileDriverSetPollMode", [&] {
        if (!is_open()) {
            set_size_parameter(size_poll_threshold_kb, threshold_kb);
            set_bool_parameter(bool_poll_mode, use_poll_mode);
        }
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetMaxDirectIOSize(std::size_t size_kb) {
    return set_parameter_if_closed("cuFileDriverSetMaxDirectIOSize", size_max_direct_io_kb, size_kb);
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetMaxCacheSize(std::size_t size_kb) {
    return set_parameter_if_closed("cuFileDriverSetMaxCacheSize", size_max_device_cache_kb, size_kb);
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetMaxPinnedMemSize(std::size_t size_kb) {
    return set_parameter_if_closed("cuFileDriverSetMaxPinnedMemSize", size_max_pinned_kb, size_kb);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetBARSizeInKB(int device, std::size_t* size_kb) {
    return run_entry("cuFileGetBARSizeInKB", [&] {
        require_open_driver();
        if (size_kb == nullptr || device < 0 || static_cast<std::size_t>(device) >= get_device_uuids().size()) {
            throw CufileError{invalid_value};
        }
        // The BAR of an H200 has 256 GiB.
        *size_kb = std::size_t{256} << 20;
    });
}

} // namespace gdrkit::twin::cufile
