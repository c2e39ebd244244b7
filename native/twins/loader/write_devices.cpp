// The program gdrkit-twins-devices: writes the tree of files of /sys and /dev that describe the devices of the verbs
// twin. The program is a client of the twin, so the files agree with what the twin returns. `gdrkit run` starts the
// program with the environment of its child before it starts the child.
#include <infiniband/verbs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <system_error>
#include <vector>

#include "loader/tree_files.hpp"
#include "model/config.hpp"
#include "model/gpu.hpp"

namespace gdrkit::twin {
namespace {

namespace fs = std::filesystem;

template <typename... Arguments> std::string format(const char* pattern, Arguments... arguments) {
    char buffer[256];
    std::snprintf(buffer, sizeof buffer, pattern, arguments...);
    return buffer;
}

void write_file(const fs::path& path, const std::string& text) {
    fs::create_directories(path.parent_path());
    std::ofstream file(path);
    file << text << "\n";
    file.close();
    if (!file) {
        throw std::system_error(errno, std::generic_category(), "write " + path.string());
    }
}

// Create a symbolic link with a relative target, as in sysfs, so that the link stays inside the tree.
void write_link(const fs::path& link, const fs::path& target) {
    fs::create_directories(link.parent_path());
    fs::create_symlink(target.lexically_relative(link.parent_path()), link);
}

// Programs such as UCX check that a device node is a character device that they may open. A twin has no such device, so
// link to /dev/full, where every ioctl fails with ENOTTY and every write with ENOSPC.
void write_device_node(const fs::path& path) {
    fs::create_symlink("/dev/full", path);
}

std::string read_first_line(const char* path, const char* fallback) {
    std::string line;
    std::ifstream file(path);
    return std::getline(file, line) && !line.empty() ? line : fallback;
}

// A PCI function as lspci shows it. The vendor id of the NICs and bridges, 0xfff0, is not assigned to any vendor.
struct PciFunction {
    std::string address;
    std::string vendor;
    std::string device;
    const char* device_class;
};
// PCI class codes.
constexpr const char* bridge_class = "0x060400";
constexpr const char* ethernet_class = "0x020000";
constexpr const char* display_class = "0x030200";

void write_pci_function(const fs::path& tree, const fs::path& folder, const PciFunction& function) {
    write_file(folder / "vendor", function.vendor);
    write_file(folder / "device", function.device);
    write_file(folder / "subsystem_vendor", function.vendor);
    write_file(folder / "subsystem_device", function.device);
    write_file(folder / "class", function.device_class);
    write_file(folder / "revision", "0x01");
    write_file(folder / "numa_node", "0");
    write_file(folder / "local_cpulist", read_first_line("/sys/devices/system/node/node0/cpulist", "0"));
    write_file(folder / "local_cpus", read_first_line("/sys/devices/system/node/node0/cpumap", "1"));
    for (const char* const prefix : {"max", "current"}) {
        write_file(folder / (std::string(prefix) + "_link_speed"), "16.0 GT/s PCIe");
        write_file(folder / (std::string(prefix) + "_link_width"), "16");
    }
    write_file(folder / "uevent", "PCI_SLOT_NAME=" + function.address);
    write_link(tree / "sys/bus/pci/devices" / function.address, folder);
}

// Write a PCIe switch below a root port of its own, and return the folders of its two downstream ports, for a NIC and
// for a GPU. Programs regard a NIC and a GPU below one switch as neighbours. Bus numbers: 0x40 + index for a switch,
// 0x60 + index for its downstream ports, 0x80 + index for a NIC, and first_gpu_pci_bus + index for a GPU.
std::pair<fs::path, fs::path> write_switch(const fs::path& tree, unsigned index) {
    const fs::path host_bridge = tree / "sys/devices" / host_bridge_name;
    const auto make_bridge_function = [](std::string address) {
        return PciFunction{std::move(address), "0xfff0", "0x0002", bridge_class};
    };
    const std::string root_port_address = format("7d00:00:%02x.0", index + 1),
                      upstream_port_address = format("7d00:%02x:00.0", 0x40 + index);
    write_pci_function(tree, host_bridge / root_port_address, make_bridge_function(root_port_address));
    write_pci_function(tree, host_bridge / root_port_address / upstream_port_address,
                       make_bridge_function(upstream_port_address));
    const std::string nic_port_address = format("7d00:%02x:00.0", 0x60 + index),
                      gpu_port_address = format("7d00:%02x:01.0", 0x60 + index);
    const fs::path switch_folder = host_bridge / root_port_address / upstream_port_address;
    write_pci_function(tree, switch_folder / nic_port_address, make_bridge_function(nic_port_address));
    write_pci_function(tree, switch_folder / gpu_port_address, make_bridge_function(gpu_port_address));
    return {switch_folder / nic_port_address, switch_folder / gpu_port_address};
}

std::string format_guid(const void* guid) {
    const auto* const bytes = static_cast<const std::uint8_t*>(guid);
    return format("%02x%02x:%02x%02x:%02x%02x:%02x%02x", bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5],
                  bytes[6], bytes[7]);
}

// Return the rate of the port in the form of the kernel's file (drivers/infiniband/core/sysfs.c). ibv_port_attr has the
// codes 1, 2, 4 and 8 for the widths 1X, 4X, 8X and 12X.
std::string format_rate(const ibv_port_attr& port) {
    const int lane_count = port.active_width == 1 ? 1 : port.active_width == 2 ? 4 : port.active_width == 4 ? 8 : 12;
    struct Speed {
        std::uint8_t code;
        const char* name;
        double gigabits_per_lane;
    };
    for (const Speed& speed : {Speed{1, "SDR", 2.5}, Speed{2, "DDR", 5}, Speed{4, "QDR", 10}, Speed{8, "FDR10", 10},
                               Speed{16, "FDR", 14}, Speed{32, "EDR", 25}, Speed{64, "HDR", 50}}) {
        if (speed.code == port.active_speed) {
            return format("%g Gb/sec (%dX %s)", speed.gigabits_per_lane * lane_count, lane_count, speed.name);
        }
    }
    return "0 Gb/sec";
}

const char* get_port_state_text(ibv_port_state state) {
    return state == IBV_PORT_ACTIVE ? "4: ACTIVE" : state == IBV_PORT_INIT ? "2: INIT" : "1: DOWN";
}

void write_gids(const fs::path& folder, ibv_context* context, int table_length) {
    // As in sysfs, the GID of an empty entry is zero. The kernel cannot read the other files of such an entry (EINVAL),
    // and here they do not exist.
    for (int index = 0; index < table_length; ++index) {
        write_file(folder / "gids" / std::to_string(index), "0000:0000:0000:0000:0000:0000:0000:0000");
    }
    std::vector<ibv_gid_entry> entries(256); // more than a device of the twin has
    const ssize_t count = ibv_query_gid_table(context, entries.data(), entries.size(), 0);
    if (count < 0) {
        throw std::runtime_error("ibv_query_gid_table failed");
    }
    entries.resize(static_cast<std::size_t>(count));
    for (const ibv_gid_entry& entry : entries) {
        const std::string index_text = std::to_string(entry.gid_index);
        std::string gid_text;
        for (unsigned byte_index = 0; byte_index < sizeof entry.gid.raw; byte_index += 2) {
            gid_text += format("%s%02x%02x", byte_index == 0 ? "" : ":", entry.gid.raw[byte_index],
                               entry.gid.raw[byte_index + 1]);
        }
        write_file(folder / "gids" / index_text, gid_text);
        write_file(folder / "gid_attrs/types" / index_text,
                   entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : "IB/RoCE v1");
        // The packets of the twin stay in this machine, so their network interface is the loopback.
        write_file(folder / "gid_attrs/ndevs" / index_text, "lo");
    }
}

void write_port(const fs::path& folder, ibv_context* context) {
    ibv_port_attr port{};
    if (ibv_query_port(context, 1, &port) != 0) {
        throw std::runtime_error("ibv_query_port failed");
    }
    write_file(folder / "state", get_port_state_text(port.state));
    write_file(folder / "phys_state", port.phys_state == 5 ? "5: LinkUp" : "3: Disabled");
    write_file(folder / "rate", format_rate(port));
    write_file(folder / "lid", format("0x%x", port.lid));
    write_file(folder / "lid_mask_count", std::to_string(port.lmc));
    write_file(folder / "sm_lid", format("0x%x", port.sm_lid));
    write_file(folder / "sm_sl", std::to_string(port.sm_sl));
    write_file(folder / "cap_mask", format("0x%08x", port.port_cap_flags));
    write_file(folder / "link_layer", port.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand");
    for (int index = 0; index < port.pkey_tbl_len; ++index) {
        __be16 pkey = 0;
        if (ibv_query_pkey(context, 1, index, &pkey) != 0) {
            throw std::runtime_error("ibv_query_pkey failed");
        }
        const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&pkey);
        write_file(folder / "pkeys" / std::to_string(index), format("0x%02x%02x", bytes[0], bytes[1]));
    }
    write_gids(folder, context, port.gid_tbl_len);
    // When a program opens one of the first four counters, the library for LD_PRELOAD (devices.cpp) gives it a file
    // with the present value. The other counters count failures, which the twin does not have.
    for (const char* const name :
         {"port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets", "symbol_error",
          "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards", "port_xmit_wait"}) {
        write_file(folder / "counters" / name, "0");
    }
    write_file(folder / "hw_counters/lifespan", "10"); // milliseconds
}

void write_nic(const fs::path& tree, const fs::path& switch_port_folder, unsigned index, ibv_device* device) {
    ibv_context* const context = ibv_open_device(device);
    ibv_device_attr attributes{};
    if (context == nullptr || ibv_query_device(context, &attributes) != 0) {
        throw std::runtime_error("ibv_query_device failed");
    }
    const PciFunction function{format("7d00:%02x:00.0", 0x80 + index), "0xfff0", "0x0001", ethernet_class};
    const fs::path function_folder = switch_port_folder / function.address;
    write_pci_function(tree, function_folder, function);

    const std::string device_name = ibv_get_device_name(device);
    const fs::path infiniband_folder = function_folder / "infiniband" / device_name;
    write_file(infiniband_folder / "node_type", "1: CA");
    write_file(infiniband_folder / "node_guid", format_guid(&attributes.node_guid));
    write_file(infiniband_folder / "sys_image_guid", format_guid(&attributes.sys_image_guid));
    write_file(infiniband_folder / "node_desc", "software twin " + device_name);
    write_file(infiniband_folder / "fw_ver", attributes.fw_ver);
    write_file(infiniband_folder / "hca_type", "twin");
    write_file(infiniband_folder / "board_id", "twin");
    write_file(infiniband_folder / "hw_rev", format("%x", attributes.hw_ver));
    write_port(infiniband_folder / "ports/1", context);
    // Programs take the PCI address from the last part of this link's target.
    fs::create_symlink("../../../" + function.address, infiniband_folder / "device");
    write_link(infiniband_folder / "subsystem", tree / "sys/class/infiniband");
    write_link(tree / "sys/class/infiniband" / device_name, infiniband_folder);

    const std::string verbs_device_name = device->dev_name;
    const fs::path verbs_folder = function_folder / "infiniband_verbs" / verbs_device_name;
    write_file(verbs_folder / "ibdev", device_name);
    write_file(verbs_folder / "abi_version", "1");
    // Major number 231 and first minor number 192 belong to uverbs (drivers/infiniband/core/uverbs_main.c).
    write_file(verbs_folder / "dev", format("231:%u", 192 + index));
    fs::create_symlink("../../../" + function.address, verbs_folder / "device");
    write_link(tree / "sys/class/infiniband_verbs" / verbs_device_name, verbs_folder);
    write_device_node(tree / "dev/infiniband" / verbs_device_name);
    ibv_close_device(context);
}

void write_tree(const fs::path& tree) {
    int nic_count = 0;
    ibv_device** const devices = ibv_get_device_list(&nic_count);
    if (devices == nullptr) {
        throw std::runtime_error(format("ibv_get_device_list failed: %s", std::strerror(errno)));
    }
    for (const char* const folder : {"sys/class/infiniband", "sys/class/infiniband_verbs", "dev/infiniband"}) {
        fs::create_directories(tree / folder);
    }
    write_file(tree / "sys/class/infiniband_verbs/abi_version", "6");
    // The file rdma_cm is not a device node, so rdma-core's librdmacm refuses it at once. With a character device that
    // answers no command, UCX would wait for events.
    write_file(tree / "dev/infiniband/rdma_cm", "");
    const unsigned gpu_count = config().gpu_count;
    for (unsigned index = 0; index < std::max(static_cast<unsigned>(nic_count), gpu_count); ++index) {
        const auto [nic_port_folder, gpu_port_folder] = write_switch(tree, index);
        if (index < static_cast<unsigned>(nic_count)) {
            write_nic(tree, nic_port_folder, index, devices[index]);
        }
        if (index < gpu_count) {
            // cuDeviceGetPCIBusId returns the same address.
            const PciFunction gpu{format("0000:%02x:00.0", first_gpu_pci_bus + index),
                                  format("0x%04x", gpu_pci_vendor_id), format("0x%04x", gpu_pci_device_id),
                                  display_class};
            write_pci_function(tree, gpu_port_folder / gpu.address, gpu);
        }
    }
    ibv_free_device_list(devices);
}

} // namespace
} // namespace gdrkit::twin

int main(int argument_count, char** arguments) {
    if (argument_count != 2) {
        std::cerr << "usage: gdrkit-twins-devices FOLDER (which must not exist)\n";
        return 2;
    }
    try {
        if (!std::filesystem::create_directory(arguments[1])) {
            throw std::runtime_error("the folder exists");
        }
        gdrkit::twin::write_tree(arguments[1]);
    } catch (const std::exception& error) {
        std::cerr << "gdrkit-twins-devices: " << arguments[1] << ": " << error.what() << "\n";
        return 1;
    }
    return 0;
}
