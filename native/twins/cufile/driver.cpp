// Opening, closing and properties of the cuFile driver.

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

std::atomic<std::uint64_t> properties_call_count = 0;

struct DriverState {
    std::mutex mutex;
    bool is_driver_open = false;
    long use_count = 0;
    int operations_in_progress = 0;
    CompatModes compat_modes;
    std::vector<std::array<std::uint8_t, 16>> uuids;
};

DriverState& driver() {
    static auto* const instance = new DriverState;
    return *instance;
}

// Open the driver unless it is open. The caller holds the lock. Throw CufileError (invalid_value) if an environment
// variable or the fault plan is malformed.
void open_driver(DriverState* driver_state) {
    if (!configuration_error().empty()) {
        throw CufileError{invalid_value};
    }
    if (!driver_state->is_driver_open) {
        driver_state->uuids = initialize_cuda();
        driver_state->compat_modes = apply_parameters();
        // Fail if no transfer would be possible: compat mode is not allowed, and no fault rule enables a direct path.
        if (!driver_state->compat_modes.allow_compat && !FaultSite("cufile.route").has_rule()) {
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
        if (driver_state.operations_in_progress > 0) {
            throw CufileError{driver_closing};
        }
        // Registrations end with the driver, so a later deregistration counts as a double release.
        drop_files();
        drop_buffers();
        driver_state.use_count = 0;
        driver_state.is_driver_open = false;
    });
}

// Run an older function that sets a parameter, such as cuFileDriverSetMaxCacheSize. These functions have no effect
// while the driver is open.
Error set_parameter_if_closed(std::string_view symbol, SizeParameter index, std::size_t value) {
    return run_entry(symbol, [&] {
        if (!is_open()) {
            set_size_parameter(index, value);
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

CompatModes get_compat_modes() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    return driver_state.compat_modes;
}

std::uint64_t count_properties_calls() {
    return properties_call_count;
}

std::vector<std::array<std::uint8_t, 16>> get_device_uuids() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    return driver_state.uuids;
}

OperationInProgress::OperationInProgress() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    if (!driver_state.is_driver_open) {
        throw CufileError{driver_not_initialized};
    }
    ++driver_state.operations_in_progress;
}

OperationInProgress::~OperationInProgress() {
    DriverState& driver_state = driver();
    std::lock_guard lock(driver_state.mutex);
    --driver_state.operations_in_progress;
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
        // nvidia-fs is not loaded: version 0.0, and no supported file systems.
        *properties = {};
        const bool allows_compat = is_open() ? get_compat_modes().allow_compat : get_bool_parameter(bool_allow_compat);
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

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetPollMode(bool poll, std::size_t threshold_kb) {
    return run_entry("cuFileDriverSetPollMode", [&] {
        if (!is_open()) {
            set_size_parameter(size_poll_threshold_kb, threshold_kb);
            set_bool_parameter(bool_poll_mode, poll);
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
        // The BAR size of an H200: 256 GiB.
        *size_kb = std::size_t{256} << 20;
    });
}

} // namespace gdrkit::twin::cufile
