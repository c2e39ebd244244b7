// The NUMA node of a device, and its memory and processors.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>

namespace gdrkit::engine {

// Returns the node of a PCI device ("0000:1c:00.0") from sysfs; -1 if the machine has only one node, or it is unknown.
int node_of(const std::string& bus_id, const std::string& sysfs = "/sys");

// Returns in `found` the processors of a node that this process may use; false if there are none or the node is -1.
bool processors_of(int node, cpu_set_t& found, const std::string& sysfs = "/sys");

// Asks the kernel to take the pages of a mapping from this node if it has any; -1 means from any node.
void prefer_node(void* at, std::size_t length, int node) noexcept;

} // namespace gdrkit::engine
