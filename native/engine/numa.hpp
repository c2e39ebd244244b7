// NUMA nodes: the node of a device, the processors of a node, and the preferred node of a mapping.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>

namespace gdrkit::engine {

// Returns the NUMA node of a PCI device ("0000:1c:00.0") from sysfs. Returns -1 if the machine has only one node, or if
// the node is unknown. Tests replace the folder `sysfs`.
int node_of_device(const std::string& bus_id, const std::string& sysfs = "/sys");

// Stores in `cpus` the processors of a node that this process may use. Returns false if there is no such processor, or
// if `node` is -1.
bool cpus_of_node(int node, cpu_set_t& cpus, const std::string& sysfs = "/sys");

// Asks the kernel to take the pages of a mapping from this node if the node has free pages. -1 means any node.
void prefer_node(void* mapping, std::size_t length, int node) noexcept;

} // namespace gdrkit::engine
