// The files through which the loader's libraries and the verbs twin share the state of a domain: the tree with the
// device files, and the port counters.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdrkit::twin {

// This environment variable has the path of the folder with the state of the domain (the emulated machine). `gdrkit
// run` creates the folder.
inline constexpr const char* state_folder_variable = "GDRKIT_TWINS_STATE";

// Paths below that folder. The folder `tree` contains the device files under the same paths as below /. The file
// `counters` has one PortCounters for each device.
inline constexpr const char* tree_folder_name = "/tree";
inline constexpr const char* counters_file_name = "/counters";
inline constexpr std::size_t max_devices = 16;

// Traffic of all processes of the domain that passed the port of a device since the folder was created. A byte count
// includes the headers of each packet. Processes change the numbers by atomic additions.
struct PortCounters {
    std::uint64_t sent_bytes = 0;
    std::uint64_t received_bytes = 0;
    std::uint64_t sent_packets = 0;
    std::uint64_t received_packets = 0;
};
static_assert(sizeof(PortCounters) == 32);
inline constexpr std::size_t counters_file_bytes = max_devices * sizeof(PortCounters);

// All devices of the tree are below this host bridge. A real machine has no PCI domain with this number.
inline constexpr const char* host_bridge_name = "pci7d00:00";

} // namespace gdrkit::twin
