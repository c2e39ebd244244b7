// Opens and closes the devices of the hl-thunk twin, and queries their properties. Also implements hlthunk_malloc,
// hlthunk_free and hlthunk_get_version.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "hlthunk/device.hpp"
#include "hlthunk/entry.hpp"
#include "model/config.hpp"
#include "model/trace.hpp"

namespace gdrkit::twin::gaudi {
namespace {

constexpr std::size_t bus_id_length = 12; // 0000:33:00.0

// Return the bus id of a device. The devices have the PCI bus numbers 0x33, 0x34, and so on.
std::string make_bus_id(unsigned index) {
    char bus_id[16];
    std::snprintf(bus_id, sizeof bus_id, "0000:%02x:00.0", 0x33 + index);
    return bus_id;
}

// Module ids differ from device indexes, as on a real board.
std::uint32_t get_module_id(unsigned index) {
    return index < 8 ? 7 - index : index;
}

// Return the index of the device with this bus id, or -1 if no device has it. The bus id may lack the PCI domain, and
// characters after a complete bus id are ignored.
int find_index_by_bus_id(const char* bus_id) {
    // A bus id without the PCI domain, such as 33:00.0, has 7 characters.
    std::string full_bus_id = std::strlen(bus_id) == 7 ? "0000:" + std::string(bus_id) : std::string(bus_id);
    full_bus_id.resize(std::min(full_bus_id.size(), bus_id_length));
    for (unsigned index = 0; index < config().gaudi_count; ++index) {
        if (full_bus_id == make_bus_id(index)) {
            return static_cast<int>(index);
        }
    }
    return -1;
}

int find_index_by_module_id(std::uint32_t module_id) {
    for (unsigned index = 0; index < config().gaudi_count; ++index) {
        if (get_module_id(index) == module_id) {
            return static_cast<int>(index);
        }
    }
    return -1;
}

int open_by_bus_id(const char* bus_id, int (*open_at_index)(unsigned)) {
    const int index = find_index_by_bus_id(bus_id);
    return index < 0 ? -EINVAL : open_at_index(static_cast<unsigned>(index));
}

// Open the first free device whose generation is `device_name`, or of any generation for dont_care. Like the real
// library, return -1 and set errno if no device can be opened.
int open_by_name(int device_name, int (*open_at_index)(unsigned)) {
    int error = ENOENT;
    for (unsigned index = 0; index < config().gaudi_count; ++index) {
        if (device_name == dont_care || device_name == generation_properties().name) {
            const int fd = open_at_index(index);
            if (fd >= 0) {
                return fd;
            }
            error = fd == -ENOENT ? error : -fd;
        }
    }
    errno = error;
    return -1;
}

// Implement hlthunk_open and hlthunk_open_control_by_name: open by bus id, or by name if the bus id is null.
int open_by_bus_id_or_name(std::string_view symbol, int device_name, const char* bus_id,
                           int (*open_at_index)(unsigned)) {
    const int call_error = catch_exceptions([&] { return begin_call(symbol); });
    if (call_error != 0) {
        errno = call_error;
        return -call_error;
    }
    int fd = -1;
    const int error = catch_exceptions([&] {
        fd = bus_id != nullptr ? open_by_bus_id(bus_id, open_at_index) : open_by_name(device_name, open_at_index);
        return 0;
    });
    trace("%.*s device_name=%d busid=%s -> %d", static_cast<int>(symbol.size()), symbol.data(), device_name,
          bus_id != nullptr ? bus_id : "NULL", fd);
    // open_by_bus_id() returns -errno. open_by_name() returns -1 and has set errno, which must not change.
    if (error != 0 || (fd < 0 && fd != -1)) {
        errno = error != 0 ? error : -fd;
    }
    return error != 0 ? -error : fd;
}

// Implement hlthunk_get_hw_ip_info. `Info` is the structure of 2021 or of 2023.
template <typename Info> int run_hardware_info_entry(int fd, Info* info) {
    return run_entry("hlthunk_get_hw_ip_info", [&] {
        unsigned index = 0;
        int error = 0;
        if (info == nullptr) {
            return EINVAL;
        }
        if (!find_device_index(fd, &index, &error)) {
            return error;
        }
        const Properties& device_properties = generation_properties();
        *info = Info{};
        info->dram_base_address = device_properties.has_virtual_memory ? device_properties.dram_virtual_base
                                                                       : device_properties.dram_user_base;
        info->dram_size = device_properties.dram_end() - device_properties.dram_user_base;
        info->device_id = device_properties.pci_id;
        info->dram_enabled = 1;
        std::strncpy(reinterpret_cast<char*>(info->cpucp_version), "gdrkit twin", sizeof info->cpucp_version - 1);
        info->module_id = get_module_id(index);
        std::strncpy(reinterpret_cast<char*>(info->card_name), device_properties.card_name, sizeof info->card_name - 1);
        info->dram_page_size = device_properties.default_page_bytes;
        if constexpr (std::is_same_v<Info, HardwareInfo>) {
            info->device_mem_alloc_default_page_size = device_properties.default_page_bytes;
            info->reserved_dram_size = device_properties.dram_user_base - device_properties.dram_base;
        }
        return 0;
    });
}

} // namespace

GDRKIT_HLTHUNK_ENTRY int hlthunk_open(int device_name, const char* bus_id) {
    return open_by_bus_id_or_name("hlthunk_open", device_name, bus_id, open_device);
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_open_by_module_id(std::uint32_t module_id) {
    const int fd = run_value_or_error_entry("hlthunk_open_by_module_id", [&] {
        const int index = find_index_by_module_id(module_id);
        // For an unknown module id the real library returns -1, the value of -EPERM.
        return index < 0 ? -EPERM : open_device(static_cast<unsigned>(index));
    });
    trace("hlthunk_open_by_module_id module_id=%u -> %d", module_id, fd);
    return fd;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_open_control(int index, const char* bus_id) {
    return run_value_or_error_entry("hlthunk_open_control", [&] {
        return bus_id != nullptr ? open_by_bus_id(bus_id, open_control_device)
                                 : open_control_device(static_cast<unsigned>(index));
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_open_control_by_name(int device_name, const char* bus_id) {
    return open_by_bus_id_or_name("hlthunk_open_control_by_name", device_name, bus_id, open_control_device);
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_open_control_by_module_id(std::uint32_t module_id) {
    return run_value_or_error_entry("hlthunk_open_control_by_module_id", [&] {
        const int index = find_index_by_module_id(module_id);
        return index < 0 ? -EBADF : open_control_device(static_cast<unsigned>(index));
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_open_control_by_bus_id(const char* bus_id) {
    return run_value_or_error_entry("hlthunk_open_control_by_bus_id", [&] {
        const int index = bus_id == nullptr ? -1 : find_index_by_bus_id(bus_id);
        return bus_id == nullptr ? -EINVAL : (index < 0 ? -EBADF : open_control_device(static_cast<unsigned>(index)));
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_close(int fd) {
    const int call_error = catch_exceptions([] { return begin_call("hlthunk_close"); });
    if (call_error != 0) {
        errno = call_error;
        return -1;
    }
    const int result = close(fd);
    const int saved_errno = errno;
    trace("hlthunk_close fd=%d -> %d", fd, result);
    static_cast<void>(catch_exceptions([] {
        close_unreferenced_devices();
        return 0;
    }));
    errno = saved_errno;
    return result;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_pci_bus_id_from_fd(int fd, char* bus_id, int size_bytes) {
    return run_entry("hlthunk_get_pci_bus_id_from_fd", [&] {
        unsigned index = 0;
        int error = 0;
        if (bus_id == nullptr || size_bytes < 0) {
            return EINVAL;
        }
        if (!find_device_index(fd, &index, &error)) {
            return error;
        }
        std::strncpy(bus_id, make_bus_id(index).c_str(), static_cast<std::size_t>(size_bytes));
        return 0;
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_device_index_from_pci_bus_id(const char* bus_id) {
    return run_value_or_error_entry("hlthunk_get_device_index_from_pci_bus_id", [&] {
        // For an unknown bus id the result is -1, which also means -EPERM.
        return bus_id == nullptr ? -EINVAL : find_index_by_bus_id(bus_id);
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_hw_ip_info(int fd, HardwareInfo* info) {
    return run_hardware_info_entry(fd, info);
}

// Programs that were linked to the library of 2021 call this function.
__asm__(".symver gdrkit_get_hw_ip_info_2021, hlthunk_get_hw_ip_info@HLTNK_1.0");
GDRKIT_HLTHUNK_ENTRY int gdrkit_get_hw_ip_info_2021(int fd, HardwareInfo2021* info) {
    return run_hardware_info_entry(fd, info);
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_device_name_from_fd(int fd) {
    unsigned index = 0;
    int error = 0;
    return configuration_error().empty() && find_device_index(fd, &index, &error) ? generation_properties().name
                                                                                  : invalid;
}

GDRKIT_HLTHUNK_ENTRY std::uint32_t hlthunk_get_device_id_from_fd(int fd) {
    unsigned index = 0;
    int error = 0;
    return configuration_error().empty() && find_device_index(fd, &index, &error) ? generation_properties().pci_id : 0;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_device_count(int device_name) {
    int count = 0;
    const int error = run_entry("hlthunk_get_device_count", [&] {
        if (device_name == invalid || device_name < 0 || device_name >= device_name_end) {
            return EINVAL;
        }
        const bool has_devices = device_name == dont_care || device_name == generation_properties().name;
        count = has_devices ? static_cast<int>(config().gaudi_count) : 0;
        return 0;
    });
    return error != 0 ? error : count;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_get_device_status_info(int fd) {
    int status = device_operational;
    const int error = run_entry("hlthunk_get_device_status_info", [&] {
        int find_error = 0;
        const DeviceRef device = find_device(fd, &find_error);
        if (!device) {
            return find_error;
        }
        std::lock_guard lock(device->mutex);
        status = device->is_operational ? device_operational : device_malfunction;
        return 0;
    });
    return error != 0 ? error : status;
}

GDRKIT_HLTHUNK_ENTRY void* hlthunk_malloc(std::size_t size_bytes) {
    return std::calloc(1, size_bytes);
}

GDRKIT_HLTHUNK_ENTRY void hlthunk_free(void* memory) {
    std::free(memory);
}

GDRKIT_HLTHUNK_ENTRY char* hlthunk_get_version() {
    auto* const version = static_cast<char*>(std::calloc(1, 128));
    if (version != nullptr) {
        std::snprintf(version, 128, "1.9.0-gdrkit");
    }
    return version;
}

} // namespace gdrkit::twin::gaudi
