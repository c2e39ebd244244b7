// Where memory and threads should be: the NUMA node of a device.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>

namespace gdrkit::engine {

// The node of a PCI device ("0000:1c:00.0"), from sysfs; -1 when the machine has one node, or nobody says.
int node_of(const std::string& bus_id, const std::string& sysfs = "/sys");

// The processors of a node that this process may use; false when there are none or the node is -1.
bool processors_of(int node, cpu_set_t& found, const std::string& sysfs = "/sys");

// Has the pages of a mapping come from this node where it has any; -1: from anywhere.
void prefer_node(void* at, std::size_t length, int node) noexcept;

} // namespace gdrkit::engine
