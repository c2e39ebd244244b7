// Opening, closing and properties of the cuFile driver.

#include "cufile/driver.hpp"

#include <atomic>
#include <mutex>

#include "cufile/buffers.hpp"
#include "cufile/cuda.hpp"
#include "cufile/entry.hpp"
#include "cufile/files.hpp"
#include "cufile/parameters.hpp"
#include "model/fault.hpp"

namespace gdrkit::twin::cufile {
namespace {

struct Driver {
    std::mutex mutex;
    bool open = false;
    long uses = 0;
    int operations_in_progress = 0;
    Modes modes;
    std::vector<std::array<std::uint8_t, 16>> uuids;
};

Driver& driver() {
    static auto* const all = new Driver;
    return *all;
}

// Open the driver. The caller holds the lock. Errors of the environment or the fault plan are reported here.
void open_driver(Driver* all) {
    if (!load_error().empty()) {
        throw CufileError{invalid_value};
    }
    if (!all->open) {
        all->uuids = open_cuda();
        all->modes = apply_parameters();
        // No transfer would be possible: no fault rule enables a direct path, and the path through the host is
        // disabled.
        if (!all->modes.allow_compat && !FaultSite("cufile.route").has_rule()) {
            throw CufileError{driver_not_initialized};
        }
        all->open = true;
    }
}

Error close_driver(std::string_view symbol) {
    return entry(symbol, [] {
        Driver& all = driver();
        std::lock_guard lock(all.mutex);
        if (!all.open) {
            throw CufileError{driver_not_initialized};
        }
        if (all.uses > 1) {
            --all.uses;
            return;
        }
        if (all.operations_in_progress > 0) {
            throw CufileError{driver_closing};
        }
        // Registrations end with the driver; deregistering one later is a double release.
        drop_files();
        drop_buffers();
        all.uses = 0;
        all.open = false;
    });
}

// Set a parameter by one of the older functions, which have no effect while the driver is open.
Error set_while_closed(std::string_view symbol, SizeParameter index, std::size_t value) {
    return entry(symbol, [&] {
        if (!is_open()) {
            set_size_parameter(index, value);
        }
    });
}

} // namespace

void ensure_open() {
    Driver& all = driver();
    std::lock_guard lock(all.mutex);
    open_driver(&all);
}

bool is_open() {
    Driver& all = driver();
    std::lock_guard lock(all.mutex);
    return all.open;
}

void require_open() {
    if (!is_open()) {
        throw CufileError{driver_not_initialized};
    }
}

Modes modes() {
    Driver& all = driver();
    std::lock_guard lock(all.mutex);
    return all.modes;
}

std::vector<std::array<std::uint8_t, 16>> device_uuids() {
    Driver& all = driver();
    std::lock_guard lock(all.mutex);
    return all.uuids;
}

OperationInProgress::OperationInProgress() {
    Driver& all = driver();
    std::lock_guard lock(all.mutex);
    if (!all.open) {
        throw CufileError{driver_not_initialized};
    }
    ++all.operations_in_progress;
}

OperationInProgress::~OperationInProgress() {
    Driver& all = driver();
    std::lock_guard lock(all.mutex);
    --all.operations_in_progress;
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverOpen() {
    return entry("cuFileDriverOpen", [] {
        Driver& all = driver();
        std::lock_guard lock(all.mutex);
        open_driver(&all);
        ++all.uses;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverClose() {
    return close_driver("cuFileDriverClose");
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverClose_v2() {
    return close_driver("cuFileDriverClose_v2");
}

GDRKIT_CUFILE_ENTRY long cuFileUseCount() {
    Driver& all = driver();
    std::lock_guard lock(all.mutex);
    return all.uses;
}

GDRKIT_CUFILE_ENTRY Error cuFileGetVersion(int* version) {
    return entry("cuFileGetVersion", [&] {
        if (version == nullptr) {
            throw CufileError{invalid_value};
        }
        *version = library_version;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverGetProperties(DriverProperties* properties) {
    return entry("cuFileDriverGetProperties", [&] {
        if (properties == nullptr) {
            throw CufileError{invalid_value};
        }
        // nvidia-fs is not loaded: version 0.0, and no supported file systems.
        *properties = {};
        const bool compat = is_open() ? modes().allow_compat : bool_parameter(bool_allow_compat);
        properties->nvfs.poll_threshold_kb = size_parameter(size_poll_threshold_kb);
        properties->nvfs.max_direct_io_kb = size_parameter(size_max_direct_io_kb);
        properties->nvfs.control_flags =
            (bool_parameter(bool_poll_mode) ? 1U << use_poll_mode_bit : 0U) | (compat ? 1U << allow_compat_bit : 0U);
        properties->feature_flags = is_open() ? 1U << batch_bit | 1U << streams_bit | 1U << parallel_bit : 0U;
        properties->max_device_cache_kb = static_cast<std::uint32_t>(size_parameter(size_max_device_cache_kb));
        properties->per_buffer_cache_kb = static_cast<std::uint32_t>(size_parameter(size_per_buffer_cache_kb));
        properties->max_pinned_kb = static_cast<std::uint32_t>(size_parameter(size_max_pinned_kb));
        properties->max_batch_io = static_cast<std::uint32_t>(size_parameter(size_batch_entries));
        properties->max_batch_timeout_ms = static_cast<std::uint32_t>(size_parameter(size_batch_timeout_ms));
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetPollMode(bool poll, std::size_t threshold_kb) {
    return entry("cuFileDriverSetPollMode", [&] {
        if (!is_open()) {
            set_size_parameter(size_poll_threshold_kb, threshold_kb);
            set_bool_parameter(bool_poll_mode, poll);
        }
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetMaxDirectIOSize(std::size_t size_kb) {
    return set_while_closed("cuFileDriverSetMaxDirectIOSize", size_max_direct_io_kb, size_kb);
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetMaxCacheSize(std::size_t size_kb) {
    return set_while_closed("cuFileDriverSetMaxCacheSize", size_max_device_cache_kb, size_kb);
}

GDRKIT_CUFILE_ENTRY Error cuFileDriverSetMaxPinnedMemSize(std::size_t size_kb) {
    return set_while_closed("cuFileDriverSetMaxPinnedMemSize", size_max_pinned_kb, size_kb);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetBARSizeInKB(int device, std::size_t* size_kb) {
    return entry("cuFileGetBARSizeInKB", [&] {
        require_open();
        if (size_kb == nullptr || device < 0 || static_cast<std::size_t>(device) >= device_uuids().size()) {
            throw CufileError{invalid_value};
        }
        // The BAR size of an H200: 256 GiB.
        *size_kb = std::size_t{256} << 20;
    });
}

} // namespace gdrkit::twin::cufile
