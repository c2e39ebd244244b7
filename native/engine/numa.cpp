// Reads the NUMA topology from sysfs, and sets the preferred node of memory with mbind(2), for the copy engine.
#include "engine/numa.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace gdrkit::engine {
namespace {

constexpr int mpol_preferred = 1; // MPOL_PREFERRED of linux/mempolicy.h
constexpr int nodes_max = 1024;
constexpr int bits_per_long = 8 * sizeof(unsigned long);

std::string read_first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

} // namespace

int node_of_device(const std::string& bus_id, const std::string& sysfs) {
    // The list of the nodes is "0" on a machine with one node, and "0-1" or "0,3" on a machine with several.
    if (read_first_line(sysfs + "/devices/system/node/online").find_first_of(",-") == std::string::npos) {
        return -1;
    }
    std::string device_name;
    for (const char character : bus_id) {
        device_name += static_cast<char>(std::tolower(static_cast<unsigned char>(character)));
    }
    const std::string node_text = read_first_line(sysfs + "/bus/pci/devices/" + device_name + "/numa_node");
    return node_text.empty() ? -1 : std::atoi(node_text.c_str());
}

bool cpus_of_node(int node, cpu_set_t& cpus, const std::string& sysfs) {
    cpu_set_t allowed_cpus;
    if (node < 0 || sched_getaffinity(0, sizeof allowed_cpus, &allowed_cpus) != 0) {
        return false;
    }
    CPU_ZERO(&cpus);
    std::istringstream cpu_ranges(
        read_first_line(sysfs + "/devices/system/node/node" + std::to_string(node) + "/cpulist"));
    for (std::string cpu_range; std::getline(cpu_ranges, cpu_range, ',');) {
        const int first_cpu = std::atoi(cpu_range.c_str());
        const std::size_t dash = cpu_range.find('-');
        const int last_cpu = dash == std::string::npos ? first_cpu : std::atoi(cpu_range.c_str() + dash + 1);
        for (int cpu = first_cpu; cpu <= last_cpu && cpu < CPU_SETSIZE; ++cpu) {
            if (CPU_ISSET(cpu, &allowed_cpus)) {
                CPU_SET(cpu, &cpus);
            }
        }
    }
    return CPU_COUNT(&cpus) > 0;
}

void prefer_node(void* mapping, std::size_t length, int node) noexcept {
    if (node < 0 || node >= nodes_max) {
        return;
    }
    unsigned long node_mask[nodes_max / bits_per_long] = {};
    node_mask[node / bits_per_long] = 1UL << (node % bits_per_long);
    // A failure is ignored: the kernel then takes each page from the node of the thread that touches the page first.
    static_cast<void>(syscall(SYS_mbind, mapping, length, mpol_preferred, node_mask, nodes_max, 0));
}

} // namespace gdrkit::engine
