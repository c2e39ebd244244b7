#include "engine/numa.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace gdrkit::engine {
namespace {

constexpr int mpol_preferred = 1; // linux/mempolicy.h
constexpr int nodes_max = 1024;
constexpr int bits = 8 * sizeof(unsigned long);

std::string line_of(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

} // namespace

int node_of_device(const std::string& bus_id, const std::string& sysfs) {
    if (line_of(sysfs + "/devices/system/node/online").find_first_of(",-") == std::string::npos) {
        return -1;
    }
    std::string name;
    for (const char each : bus_id) {
        name += static_cast<char>(std::tolower(static_cast<unsigned char>(each)));
    }
    const std::string node = line_of(sysfs + "/bus/pci/devices/" + name + "/numa_node");
    return node.empty() ? -1 : std::atoi(node.c_str());
}

bool cpus_of_node(int node, cpu_set_t& cpus, const std::string& sysfs) {
    cpu_set_t allowed;
    if (node < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return false;
    }
    CPU_ZERO(&cpus);
    std::istringstream list(line_of(sysfs + "/devices/system/node/node" + std::to_string(node) + "/cpulist"));
    for (std::string span; std::getline(list, span, ',');) {
        const int first = std::atoi(span.c_str());
        const std::size_t dash = span.find('-');
        const int last = dash == std::string::npos ? first : std::atoi(span.c_str() + dash + 1);
        for (int each = first; each <= last && each < CPU_SETSIZE; ++each) {
            if (CPU_ISSET(each, &allowed)) {
                CPU_SET(each, &cpus);
            }
        }
    }
    return CPU_COUNT(&cpus) > 0;
}

void prefer_node(void* at, std::size_t length, int node) noexcept {
    if (node < 0 || node >= nodes_max) {
        return;
    }
    unsigned long mask[nodes_max / bits] = {};
    mask[node / bits] = 1UL << (node % bits);
    // This is only a preference. Without the call, memory comes from the node of the thread that touches it first.
    static_cast<void>(syscall(SYS_mbind, at, length, mpol_preferred, mask, nodes_max, 0));
}

} // namespace gdrkit::engine
