// Determines which paths name device files, and opens a port counter as a file with its present value.
#include "loader/paths.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "loader/tree_files.hpp"

namespace gdrkit::twin {
namespace {

// These functions call the kernel directly, because devices.cpp replaces the functions of libc in this process.
int open_directly(const char* path, int flags) {
    return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0));
}
bool exists(const char* path) {
    return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
}

// Return the folder of the tree, or an empty text if there is none. The environment variable of the state folder is
// read only once, because a program may change its environment.
std::string_view get_tree_folder() {
    static char tree_folder[max_path_bytes];
    static int cached_length = -1;
    int folder_length = __atomic_load_n(&cached_length, __ATOMIC_ACQUIRE);
    if (folder_length < 0) {
        const char* const state_folder = std::getenv(state_folder_variable);
        // Several threads may write to `tree_folder` at the same time, but they write the same bytes.
        folder_length = state_folder == nullptr
                            ? 0
                            : std::snprintf(tree_folder, sizeof tree_folder, "%s%s", state_folder, tree_folder_name);
        // A longer path leaves too few bytes in Path for the files below the folder, so the tree is not used.
        if (folder_length >= static_cast<int>(sizeof tree_folder) / 2) {
            folder_length = 0;
        }
        __atomic_store_n(&cached_length, folder_length, __ATOMIC_RELEASE);
    }
    return {tree_folder, static_cast<std::size_t>(folder_length)};
}

// Folders that the tree replaces as a whole, so that programs see only the RDMA devices of the verbs twin.
constexpr std::string_view replaced_folders[] = {
    "/sys/class/infiniband", "/sys/class/infiniband_verbs", "/sys/class/infiniband_mad",
    "/dev/infiniband",       "/sys/devices/pci7d00:00",     "/sys/bus/pci/devices/7d00:",
};
static_assert(replaced_folders[4].ends_with(host_bridge_name));
// A path below this folder leads to the tree only if it does not exist on this machine.
constexpr std::string_view pci_devices_folder = "/sys/bus/pci/devices/";

// A folder that ends with ':' stands for all PCI addresses with this beginning.
bool is_in_folder(std::string_view path, std::string_view folder) {
    return path.starts_with(folder) &&
           (folder.ends_with(':') || path.size() == folder.size() || path[folder.size()] == '/');
}

bool is_device_path(const char* pathname) {
    const std::string_view path = pathname;
    if (!path.starts_with("/sys/") && !path.starts_with("/dev/infiniband")) {
        return false;
    }
    for (const std::string_view folder : replaced_folders) {
        if (is_in_folder(path, folder)) {
            return true;
        }
    }
    return path.size() > pci_devices_folder.size() && path.starts_with(pci_devices_folder) && !exists(pathname);
}

// Store the absolute path of `pathname`, a path relative to the folder of `folder_fd` or, with AT_FDCWD, to the current
// folder. Return false if the absolute path is too long or the folder has no path.
bool make_absolute(int folder_fd, const char* pathname, char* absolute_path, std::size_t size_bytes) {
    char proc_link[64];
    if (folder_fd == AT_FDCWD) {
        std::snprintf(proc_link, sizeof proc_link, "/proc/self/cwd");
    } else {
        std::snprintf(proc_link, sizeof proc_link, "/proc/self/fd/%d", folder_fd);
    }
    const long folder_length = syscall(SYS_readlinkat, AT_FDCWD, proc_link, absolute_path, size_bytes - 1);
    return folder_length > 0 && static_cast<std::size_t>(std::snprintf(
                                    absolute_path + folder_length, size_bytes - static_cast<std::size_t>(folder_length),
                                    "/%s", pathname)) < size_bytes - static_cast<std::size_t>(folder_length);
}

constexpr std::string_view counter_names[] = {"port_xmit_data", "port_rcv_data", "port_xmit_packets",
                                              "port_rcv_packets"};

const char* get_file_name(const char* path) {
    const char* const slash = std::strrchr(path, '/');
    return slash == nullptr ? path : slash + 1;
}

bool is_counter_name(const char* name) {
    for (const std::string_view counter_name : counter_names) {
        if (counter_name == name) {
            return true;
        }
    }
    return false;
}

// sysfs shows the data counters in units of four bytes (InfiniBand Architecture, PortXmitData).
std::uint64_t get_counter_value(const PortCounters& counters, std::string_view name) {
    return name == "port_xmit_data"      ? counters.sent_bytes / 4
           : name == "port_rcv_data"     ? counters.received_bytes / 4
           : name == "port_xmit_packets" ? counters.sent_packets
                                         : counters.received_packets;
}

bool read_counters(int device_index, PortCounters* counters) {
    char path[max_path_bytes];
    const std::string_view tree_folder = get_tree_folder();
    const auto state_folder_length = static_cast<int>(tree_folder.size() - std::strlen(tree_folder_name));
    std::snprintf(path, sizeof path, "%.*s%s", state_folder_length, tree_folder.data(), counters_file_name);
    const int fd = open_directly(path, O_RDONLY);
    if (fd < 0) {
        return false;
    }
    const long read_bytes = syscall(SYS_pread64, fd, counters, sizeof *counters,
                                    static_cast<long>(static_cast<std::size_t>(device_index) * sizeof *counters));
    syscall(SYS_close, fd);
    return read_bytes == sizeof *counters;
}

} // namespace

Path::Path(int folder_fd, const char* pathname) : original_path_(pathname) {
    const std::string_view tree_folder = get_tree_folder();
    if (pathname == nullptr || tree_folder.empty()) {
        return;
    }
    const int saved_errno = errno;
    if (is_device_path(pathname)) {
        const int length = std::snprintf(tree_path_, sizeof tree_path_, "%.*s%s", static_cast<int>(tree_folder.size()),
                                         tree_folder.data(), pathname);
        is_replaced_ = length < static_cast<int>(sizeof tree_path_);
        if (is_replaced_) {
            find_counter(tree_path_);
        }
    } else if (pathname[0] != '/' && is_counter_name(get_file_name(pathname)) &&
               make_absolute(folder_fd, pathname, tree_path_, sizeof tree_path_) &&
               is_in_folder(tree_path_, tree_folder)) {
        // The program has opened or entered a folder of the tree. There libc would open the counter's file of the tree,
        // which always contains 0.
        find_counter(tree_path_);
    }
    errno = saved_errno;
}

// The path of a counter ends with "/twin<device>/ports/1/counters/<name>". Symbolic links lead to that folder from
// several places, so the beginning of the path differs.
void Path::find_counter(const char* tree_path) {
    const char* const name = get_file_name(tree_path);
    if (!is_counter_name(name)) {
        return;
    }
    for (const char* component = tree_path; (component = std::strstr(component, "/twin")) != nullptr; ++component) {
        unsigned device_number = 0;
        int prefix_length = 0;
        if (std::sscanf(component, "/twin%2u/ports/1/counters/%n", &device_number, &prefix_length) == 1 &&
            prefix_length > 0 && component + prefix_length == name && device_number < max_devices) {
            device_index_ = static_cast<int>(device_number);
            counter_name_ = name;
        }
    }
}

int open_counter(const Path& path, int flags) {
    PortCounters counters;
    if ((flags & O_ACCMODE) != O_RDONLY) {
        errno = EACCES; // the files of the kernel have mode 0444
        return -1;
    }
    if (!read_counters(path.device_index(), &counters)) {
        errno = ENOENT;
        return -1;
    }
    char text[32];
    const int length =
        std::snprintf(text, sizeof text, "%" PRIu64 "\n", get_counter_value(counters, path.get_counter_name()));
    const int fd = static_cast<int>(syscall(SYS_memfd_create, path.get_counter_name(), MFD_CLOEXEC));
    if (fd >= 0) {
        syscall(SYS_pwrite64, fd, text, static_cast<std::size_t>(length), 0L);
    }
    return fd;
}

char* strip_tree_folder(char* path) {
    const std::string_view tree_folder = get_tree_folder();
    if (path != nullptr && !tree_folder.empty() && std::string_view(path).starts_with(tree_folder) &&
        path[tree_folder.size()] == '/') {
        std::memmove(path, path + tree_folder.size(), std::strlen(path + tree_folder.size()) + 1);
    }
    return path;
}

} // namespace gdrkit::twin
