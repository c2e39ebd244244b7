// Which process this is, in a way that another one can check: its number together with its start and the boot.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace gdrkit::usrbio {

struct ProcessIdentity {
    std::array<std::uint8_t, 16> boot_id{}; // Zeros where the kernel does not say.
    std::uint32_t process_id = 0;           // In its own PID namespace.
    std::uint32_t pid_namespace = 0;        // Inode number of that namespace; 0 where the kernel does not say.
    std::uint64_t started_ticks = 0;        // Clock ticks since the boot.
    bool operator==(const ProcessIdentity&) const = default;
};

ProcessIdentity this_process();

// Whether the process still runs; nothing when that cannot be seen from here (another PID namespace, a /proc that hides
// other users' processes).
std::optional<bool> is_running(const ProcessIdentity& identity);

} // namespace gdrkit::usrbio
