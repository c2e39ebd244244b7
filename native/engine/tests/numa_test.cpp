// Tests of the functions that find the NUMA node of a device and the processors of a node, with synthetic sysfs trees.
#include <fstream>

#include "engine/numa.hpp"
#include "engine/tests/fixture.hpp"

using namespace gdrkit::engine;
using namespace gdrkit::engine::test;

namespace {

void write_line(const std::string& path, const std::string& line) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path) << line << "\n";
}

void check_nodes(const Folder& folder) {
    const std::string sysfs = folder.path_of("nodes");
    CHECK(node_of_device("0000:1c:00.0", sysfs) == -1); // The tree is empty.
    write_line(sysfs + "/devices/system/node/online", "0");
    write_line(sysfs + "/bus/pci/devices/0000:1c:00.0/numa_node", "0");
    CHECK(node_of_device("0000:1c:00.0", sysfs) == -1); // With one node there is no choice.
    for (const char* online_nodes : {"0-1", "0,3"}) {
        write_line(sysfs + "/devices/system/node/online", online_nodes);
        write_line(sysfs + "/bus/pci/devices/0000:1c:00.0/numa_node", "1");
        CHECK(node_of_device("0000:1C:00.0", sysfs) == 1); // CUDA writes the address in capitals.
        write_line(sysfs + "/bus/pci/devices/0000:1c:00.0/numa_node", "-1");
        CHECK(node_of_device("0000:1C:00.0", sysfs) == -1);
        CHECK(node_of_device("0000:1d:00.0", sysfs) == -1);
    }
}

void check_processors(const Folder& folder) {
    cpu_set_t allowed_cpus, node_cpus;
    CHECK(sched_getaffinity(0, sizeof allowed_cpus, &allowed_cpus) == 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &allowed_cpus)) {
        ++cpu;
    }
    const std::string cpulist_path = folder.path_of("cpus") + "/devices/system/node/node1/cpulist";
    CHECK(!cpus_of_node(1, node_cpus, folder.path_of("cpus")) && !cpus_of_node(-1, node_cpus));
    // Processors that this process may not use, or whose numbers are too large for a cpu_set_t, are left out.
    write_line(cpulist_path, std::to_string(cpu) + ",1000-1023");
    CHECK(cpus_of_node(1, node_cpus, folder.path_of("cpus")) && CPU_COUNT(&node_cpus) == 1 &&
          CPU_ISSET(cpu, &node_cpus));
    write_line(cpulist_path, "0-1023,5000-999999");
    CHECK(cpus_of_node(1, node_cpus, folder.path_of("cpus")) && CPU_EQUAL(&node_cpus, &allowed_cpus));
    write_line(cpulist_path, "");
    CHECK(!cpus_of_node(1, node_cpus, folder.path_of("cpus")));
}

} // namespace

int main() {
    const Folder folder;
    check_nodes(folder);
    check_processors(folder);
}
