// Identity of a process that another process can verify: its number, its start time and the boot.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace gdrkit::usrbio {

struct ProcessIdentity {
    std::array<std::uint8_t, 16> boot_id{}; // Zeros if the kernel does not report it.
    std::uint32_t process_id = 0;           // Number in its own PID namespace.
    std::uint32_t pid_namespace = 0;        // Inode number of that namespace; 0 if the kernel does not report it.
    std::uint64_t started_ticks = 0;        // Start time in clock ticks since the boot.
    bool operator==(const ProcessIdentity&) const = default;
};

ProcessIdentity this_process();

// Returns whether the process still runs; nothing if that cannot be determined from here (another PID namespace, or a
// /proc that hides processes of other users).
std::optional<bool> is_running(const ProcessIdentity& identity);

} // namespace gdrkit::usrbio
