// State of the cuFile driver: whether it is open, how many operations are in progress, and the settings of this
// opening.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdrkit::twin::cufile {

struct Modes {
    bool allow_compat = true;
    bool force_compat = false;
};

// Open the driver if it is closed, as the first registration does, without adding to the use count.
void ensure_open();
// Throws CufileError (driver_not_initialized) unless the driver is open.
void require_open();
[[nodiscard]] bool is_open();

// Settings and devices that were determined when the driver was opened.
[[nodiscard]] Modes modes();
[[nodiscard]] std::vector<std::array<std::uint8_t, 16>> device_uuids();

// Keeps the driver from being closed during a transfer, queued work of a stream or an unfinished batch.
class OperationInProgress {
public:
    OperationInProgress();
    OperationInProgress(const OperationInProgress&) = delete;
    OperationInProgress& operator=(const OperationInProgress&) = delete;
    ~OperationInProgress();
};

} // namespace gdrkit::twin::cufile
