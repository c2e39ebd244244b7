// The free-running clock of a device. Completion timestamps are cycles of this clock.
#pragma once

#include <cstdint>
#include <ctime>

namespace gdrkit::twin::verbs {

// Frequency of the clock. Common NICs have this frequency, so a program fails if it treats cycles as nanoseconds.
inline constexpr std::uint64_t device_clock_khz = 156'250;
// The valid bits of a timestamp.
inline constexpr std::uint64_t device_clock_mask = (std::uint64_t{1} << 63) - 1;

inline std::uint64_t read_clock_ns(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

inline std::uint64_t read_device_cycles() {
    // 156.25 MHz are 5 cycles in 32 ns. This product does not overflow within a century of uptime.
    static_assert(device_clock_khz * 32 == 5 * 1'000'000);
    return read_clock_ns(CLOCK_MONOTONIC_RAW) * 5 / 32 & device_clock_mask;
}

} // namespace gdrkit::twin::verbs
