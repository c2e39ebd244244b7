// Opens and closes emulated Gaudi devices: their properties by generation, their device files (memfds), and the table
// of open devices.
#include "hlthunk/device.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "model/config.hpp"
#include "model/ledger.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin::gaudi {
namespace {

constexpr std::uint64_t gib = std::uint64_t{1} << 30;
constexpr std::uint64_t mib = std::uint64_t{1} << 20;

// Properties of each generation; index: GaudiGeneration. The addresses and sizes are those that the kernel driver has,
// except for the page size of Gaudi 3, which is invented.
constexpr Properties properties_by_generation[] = {
    // name, pci_id, card_name, has_virtual_memory, dram_base, dram_user_base, dram_bytes, default_page_bytes,
    // dram_virtual_base, host_virtual_base
    {DeviceName::gaudi1, pci_id_gaudi1, "HL205", false, 0x20000000, 0x20000000 + 512 * mib, 32 * gib, 2 * mib, 0,
     0x1000000000000},
    {DeviceName::gaudi2, pci_id_gaudi2, "HL225", true, 0x1001000000000000, 0x1001000000000000 + 48 * mib, 96 * gib,
     48 * mib, 0x1001000600000000, 0xfff0000000000000},
    {DeviceName::gaudi3, pci_id_gaudi3, "HL325L", true, 0x1001000000000000, 0x1001000000000000 + 32 * mib, 128 * gib,
     32 * mib, 0x1001002000000000, 0xff70000000000000},
};

// A device file is a memfd here. Its name, as /proc/self/fd shows it, is one of these prefixes and the index of the
// device.
constexpr std::string_view device_file_name_prefix = "/memfd:gdrkit-accel:";
constexpr std::string_view control_file_name_prefix = "/memfd:gdrkit-accel-control:";
// Size of a device file. A program maps a command buffer by mmap of this file, with the handle of the command buffer as
// offset. So the size must be larger than these handles.
constexpr off_t device_file_bytes = off_t{1} << 44;

struct OpenDevice {
    DeviceRef device;
    pid_t owner_pid = 0;
    // st_dev and st_ino of the device file identify it.
    dev_t filesystem = 0;
    ino_t inode = 0;
};

struct DeviceTable {
    std::mutex mutex;
    std::vector<OpenDevice> open_devices;
};

DeviceTable& device_table() {
    static auto* const instance = new DeviceTable;
    return *instance;
}

// Read the name of the file of a descriptor into `name_buffer`. Return the name, or an empty text on failure.
std::string_view read_fd_link(int fd, char (&name_buffer)[128]) {
    char link_path[64];
    std::snprintf(link_path, sizeof link_path, "/proc/self/fd/%d", fd);
    const ssize_t size_bytes = readlink(link_path, name_buffer, sizeof name_buffer);
    return size_bytes < 0 ? std::string_view() : std::string_view(name_buffer, static_cast<std::size_t>(size_bytes));
}

// Create a device file. Return its descriptor or -errno.
int make_device_file(std::string_view prefix, unsigned index) {
    char memfd_name[64]; // without the "/memfd:" of the prefix, which the kernel adds
    std::snprintf(memfd_name, sizeof memfd_name, "%s%u", prefix.substr(prefix.find(':') + 1).data(), index);
    Fd device_file(memfd_create(memfd_name, MFD_CLOEXEC));
    return !device_file || ftruncate(device_file.get(), device_file_bytes) != 0 ? -errno : device_file.release();
}

// Open the memfd again, for the program. Return a descriptor or -errno. While the program has this descriptor open,
// has_other_references returns true. That function does not count the descriptor of memfd_create, which the twin keeps.
int reopen(int fd) {
    char link_path[64];
    std::snprintf(link_path, sizeof link_path, "/proc/self/fd/%d", fd);
    const int reopened_fd = open(link_path, O_RDWR | O_CLOEXEC);
    return reopened_fd < 0 ? -errno : reopened_fd;
}

} // namespace

std::uint64_t Properties::bar_bytes() const {
    return config().gaudi_bar_mib == 0 ? dram_bytes : config().gaudi_bar_mib * mib;
}

const Properties& generation_properties() {
    return properties_by_generation[static_cast<unsigned>(config().gaudi_generation)];
}

Device::Device(unsigned index, Fd file, Fd reservation)
    : index(index), file(std::move(file)), reservation_(std::move(reservation)) {
    record_open_handle("gaudi_device", reinterpret_cast<std::uint64_t>(this));
}

Device::~Device() {
    {
        std::lock_guard lock(mutex);
        is_stopping_ = true;
    }
    changed.notify_all();
    if (job_thread_.joinable()) {
        job_thread_.join();
    }
    // Objects that the program did not free are destroyed with the context, as in the kernel. In the ledger, their
    // handles are XORed with the address of the device, because other devices may have the same handles.
    const auto self = reinterpret_cast<std::uint64_t>(this);
    for (const auto& [address, mapping] : mappings) {
        static_cast<void>(
            record_closed_handle(mapping.allocation ? "gaudi_mapping" : "gaudi_host_mapping", self ^ address));
    }
    for (const auto& [handle, allocation] : allocations) {
        static_cast<void>(record_closed_handle("gaudi_memory", self ^ handle));
    }
    for (const auto& [handle, buffer] : command_buffers) {
        static_cast<void>(record_closed_handle("gaudi_command_buffer", self ^ handle));
    }
    static_cast<void>(record_closed_handle("gaudi_device", self));
}

std::size_t Device::count_live_exports() {
    std::lock_guard lock(mutex);
    std::erase_if(physical_dmabuf_ids, [](std::uint64_t id) { return !is_dmabuf_alive(id); });
    std::size_t count = physical_dmabuf_ids.size();
    for (auto& [address, mapping] : mappings) {
        std::erase_if(mapping.dmabuf_ids, [](std::uint64_t id) { return !is_dmabuf_alive(id); });
        count += mapping.dmabuf_ids.size();
    }
    return count;
}

bool Device::is_in_use() {
    return count_live_exports() > 0 || has_other_references(file.get());
}

DeviceRef find_device(int fd, int* error) {
    struct stat file_status {};
    if (fstat(fd, &file_status) != 0) {
        *error = EBADF;
        return nullptr;
    }
    DeviceTable& table = device_table();
    std::lock_guard lock(table.mutex);
    for (const OpenDevice& open_device : table.open_devices) {
        if (open_device.filesystem == file_status.st_dev && open_device.inode == file_status.st_ino) {
            *error = open_device.owner_pid == getpid() ? 0 : ENODEV;
            return open_device.owner_pid == getpid() ? open_device.device : nullptr;
        }
    }
    char name_buffer[128];
    *error = read_fd_link(fd, name_buffer).starts_with(device_file_name_prefix) ? ENODEV : ENOTTY;
    return nullptr;
}

bool find_device_index(int fd, unsigned* index, int* error) {
    char name_buffer[128];
    const std::string_view file_name = read_fd_link(fd, name_buffer);
    if (file_name.starts_with(control_file_name_prefix)) {
        *index = static_cast<unsigned>(
            std::strtoul(std::string(file_name.substr(control_file_name_prefix.size())).c_str(), nullptr, 10));
        return true;
    }
    const DeviceRef device = find_device(fd, error);
    if (device) {
        *index = device->index;
    }
    return device != nullptr;
}

int open_device(unsigned index) {
    if (index >= config().gaudi_count) {
        return -ENOENT;
    }
    close_unreferenced_devices();
    // Like the kernel, let only one process open a device. A listening socket with the name of the device reserves the
    // device for this process. All processes of the domain (GDRKIT_TWINS_DOMAIN) use the same names, and the socket is
    // closed when the process ends.
    Fd reservation(listen_on("gaudi." + std::to_string(index)));
    if (!reservation) {
        return reservation.get() == -EADDRINUSE ? -EBUSY : reservation.get();
    }
    Fd file(make_device_file(device_file_name_prefix, index));
    if (!file) {
        return file.get();
    }
    const int client_fd = reopen(file.get());
    struct stat file_status {};
    if (client_fd < 0 || fstat(client_fd, &file_status) != 0) {
        return client_fd < 0 ? client_fd : -errno;
    }
    OpenDevice new_device{nullptr, getpid(), file_status.st_dev, file_status.st_ino};
    new_device.device = std::make_shared<Device>(index, std::move(file), std::move(reservation));
    DeviceTable& table = device_table();
    std::lock_guard lock(table.mutex);
    table.open_devices.push_back(std::move(new_device));
    return client_fd;
}

int open_control_device(unsigned index) {
    return index >= config().gaudi_count ? -ENOENT : make_device_file(control_file_name_prefix, index);
}

void close_unreferenced_devices() {
    std::vector<OpenDevice> unreferenced_devices; // destroyed after the lock is released
    DeviceTable& table = device_table();
    {
        std::lock_guard lock(table.mutex);
        std::erase_if(table.open_devices, [&](OpenDevice& open_device) {
            if (open_device.owner_pid != getpid() || open_device.device->is_in_use()) {
                return false;
            }
            unreferenced_devices.push_back(std::move(open_device));
            return true;
        });
    }
}

std::size_t count_open_devices() {
    DeviceTable& table = device_table();
    std::lock_guard lock(table.mutex);
    return table.open_devices.size();
}

std::size_t count_live_exports() {
    DeviceTable& table = device_table();
    std::lock_guard lock(table.mutex);
    std::size_t count = 0;
    for (const OpenDevice& open_device : table.open_devices) {
        count += open_device.device->count_live_exports();
    }
    return count;
}

} // namespace gdrkit::twin::gaudi
