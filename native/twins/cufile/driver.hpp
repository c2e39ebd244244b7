// The driver of cuFile: open or not, who is at work, and the settings that count while it is open.
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

// Opens the driver as the first registration does, without adding a use that somebody must give back.
void open_if_closed();
// Throws Refused (driver_not_initialized) unless the driver is open.
void require_open();
[[nodiscard]] bool is_open();

// What the driver was opened with.
[[nodiscard]] Modes modes();
[[nodiscard]] std::vector<std::array<std::uint8_t, 16>> device_uuids();

// While one lives, the driver cannot be closed: a transfer, a stream's work, a batch that is not done.
class AtWork {
public:
    AtWork();
    AtWork(const AtWork&) = delete;
    AtWork& operator=(const AtWork&) = delete;
    ~AtWork();
};

} // namespace gdrkit::twin::cufile
