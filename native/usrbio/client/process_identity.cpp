// Reads the identity of a process from /proc.
#include "usrbio/client/process_identity.hpp"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace gdrkit::usrbio {
namespace {

constexpr int fields_before_start = 19; // Fields between field 2 (name) and field 22 (start time) of /proc/<pid>/stat.

// Returns the 16 bytes of the boot's UUID; zeros if the kernel does not report a UUID.
std::array<std::uint8_t, 16> read_boot_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string text;
    file >> text;
    std::erase(text, '-');
    std::array<std::uint8_t, 16> boot_id{};
    if (text.size() != 32 || text.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
        return boot_id;
    }
    for (std::size_t index = 0; index < boot_id.size(); ++index) {
        boot_id[index] = static_cast<std::uint8_t>(std::strtoul(text.substr(2 * index, 2).c_str(), nullptr, 16));
    }
    return boot_id;
}

// Returns the inode number of the PID namespace of this process; 0 if it is unknown.
std::uint32_t read_pid_namespace() {
    struct stat attributes {};
    return stat("/proc/self/ns/pid", &attributes) == 0 ? static_cast<std::uint32_t>(attributes.st_ino) : 0;
}

// The state and the start time in /proc/<pid>/stat.
struct ProcessStart {
    std::uint64_t ticks = 0; // Start time in clock ticks since the boot.
    char state = '?';
};

// Reads the file `stat` of a process. `proc_entry`: the name of its folder in /proc, a pid or "self". Returns nothing
// if there is no such process.
std::optional<ProcessStart> read_process_start(const std::string& proc_entry) {
    std::ifstream file("/proc/" + proc_entry + "/stat");
    std::stringstream text;
    text << file.rdbuf();
    // The name of the process is in parentheses and may contain any character, so search for the last parenthesis.
    const std::string line = text.str();
    const auto name_end = line.rfind(')');
    if (!file || name_end == std::string::npos) {
        return std::nullopt;
    }
    std::istringstream fields(line.substr(name_end + 1));
    ProcessStart start;
    fields >> start.state;
    std::string skipped_field;
    // The state is the first of the fields before the start time, so skip one field less.
    for (int field = 1; field < fields_before_start; ++field) {
        fields >> skipped_field;
    }
    fields >> start.ticks;
    return fields ? std::optional(start) : std::nullopt;
}

} // namespace

ProcessIdentity identify_this_process() {
    const auto start = read_process_start("self");
    return {read_boot_id(), static_cast<std::uint32_t>(getpid()), read_pid_namespace(), start ? start->ticks : 0};
}

std::optional<bool> is_running(const ProcessIdentity& identity) {
    constexpr std::array<std::uint8_t, 16> zeros{};
    const auto this_boot = read_boot_id();
    if (this_boot != zeros && identity.boot_id != zeros && this_boot != identity.boot_id) {
        return false;
    }
    const std::uint32_t this_namespace = read_pid_namespace();
    if (this_namespace == 0 || this_namespace != identity.pid_namespace) {
        return std::nullopt;
    }
    if (const auto start = read_process_start(std::to_string(identity.process_id))) {
        // The states of proc(5): Z is a zombie, X and x are dead processes.
        const bool has_ended = start->state == 'Z' || start->state == 'X' || start->state == 'x';
        return start->ticks == identity.started_ticks && !has_ended;
    }
    if (kill(static_cast<pid_t>(identity.process_id), 0) != 0 && errno == ESRCH) {
        return false;
    }
    return std::nullopt;
}

} // namespace gdrkit::usrbio
