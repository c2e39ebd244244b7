// State of the cuFile driver: whether it is open, how many operations are in progress, and the settings with which it
// was opened.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdrkit::twin::cufile {

// Settings of compat mode, in which the bytes of a transfer move through host memory.
struct CompatSettings {
    bool allow_compat = true;  // false: a transfer that cannot take a direct path fails
    bool force_compat = false; // true: every transfer uses compat mode
};

// Open the driver if it is closed. The use count stays the same. The registration of a file or of a buffer
// opens the driver by this function.
void ensure_open();
// Throw CufileError (driver_not_initialized) unless the driver is open.
void require_open_driver();
[[nodiscard]] bool is_open();

// Return the settings, and the UUIDs of the devices, that were determined when the driver was opened.
[[nodiscard]] CompatSettings get_compat_settings();
[[nodiscard]] std::vector<std::array<std::uint8_t, 16>> get_device_uuids();

// Return the number of calls of cuFileDriverGetProperties in this process. A transfer of a stream through the
// host fails if such a call happens while the transfer is queued (transfer.cpp).
[[nodiscard]] std::uint64_t count_properties_calls();

// An object that keeps the driver from being closed during its lifetime. Each transfer has such an object while it
// runs, and a transfer in a stream also while it is queued. The constructor throws CufileError (driver_not_initialized)
// unless the driver is open.
class OperationInProgress {
public:
    OperationInProgress();
    OperationInProgress(const OperationInProgress&) = delete;
    OperationInProgress& operator=(const OperationInProgress&) = delete;
    ~OperationInProgress();
};

} // namespace gdrkit::twin::cufile
