// Identity of a process: the pid and its namespace, the start time and the id of the boot. A share handle contains the
// identity of the process that owns the memory. The importer compares all parts. So it notices that the owner has
// ended, even if another process has the same pid now.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace gdrkit::usrbio {

struct ProcessIdentity {
    std::array<std::uint8_t, 16> boot_id{}; // Zeros if the kernel reports no boot id.
    std::uint32_t process_id = 0;           // The pid in the PID namespace of the process.
    std::uint32_t pid_namespace = 0;        // Inode number of that namespace; 0 if unknown.
    std::uint64_t started_ticks = 0;        // Start time in clock ticks since the boot.
    bool operator==(const ProcessIdentity&) const = default;
};

ProcessIdentity identify_this_process();

// Returns whether the process still runs. Returns nothing if this is unknown: the process is in another PID namespace,
// or /proc hides processes of other users.
std::optional<bool> is_running(const ProcessIdentity& identity);

} // namespace gdrkit::usrbio
