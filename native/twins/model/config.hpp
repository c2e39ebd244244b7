// Configuration of the emulated machine, read from the GDRKIT_TWINS_* environment variables once, at the first call of
// a twin. All twins read it, so that they agree on the devices and the random seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/fabric_address.hpp"

namespace gdrkit::twin {

enum class GaudiGeneration { gaudi, gaudi2, gaudi3 };

struct Config {
    // Name of the emulated machine. Processes of one user with the same domain see each other like processes of one
    // machine.
    std::string domain = "default";
    // Addresses of the NICs on the TCP fabric, one for each NIC. If the list is empty, queue pairs find each other only
    // within one network namespace.
    std::vector<FabricAddress> fabric_addresses;
    // Secret by which both ends of a fabric connection authenticate each other.
    std::string fabric_secret;
    std::uint64_t seed = 0;
    unsigned nic_count = 2;
    unsigned gpu_count = 2;
    unsigned gaudi_count = 2;
    GaudiGeneration gaudi_generation = GaudiGeneration::gaudi2;
    // The PCI BAR of a Gaudi maps this number of MiB of its memory, from the first byte on. 0: it maps all memory.
    std::uint64_t gaudi_bar_mib = 0;
    int cufile_version = 1200;        // in the form of cuFileGetVersion: 1150 for 1.15
    bool has_peermem = true;          // true: ibv_reg_mr accepts device addresses, as with the nvidia_peermem module
    bool udev_knows_all_disks = true; // false: cuFile registers only files on disks in udev's database
    // Attribute GPU_DIRECT_RDMA_WRITES_ORDERING of the GPUs. 100 is CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER.
    int writes_ordering = 100;
    // Attribute GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS of the GPUs. 1 is CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST.
    int flush_options = 1;
    std::string fault_plan_path;
    unsigned max_delay_us = 300; // largest random delay of a completion or of a stream's work
    // Percentage of the completions, and of the work in streams, that are delayed by a random time. A small percentage
    // is enough to find code that relies on an order that hardware does not guarantee, and programs still run at nearly
    // full speed.
    unsigned delayed_percent = 1;
    // Error text if a variable is malformed, else empty. The text has already been printed on stderr. The first
    // function that a client calls (ibv_get_device_list, cuInit) must then fail.
    std::string error;
};

const Config& config();

// Return the next number of this process's random generator, which is seeded by the configuration and the process id.
// Every thread may call this function.
std::uint64_t random_u64();

// Return 0 or, with a probability of delayed_percent, a random delay from 0 to max_delay_us microseconds.
std::uint64_t random_delay_us();

// Sleep for random_delay_us() microseconds.
void sleep_random_delay();

} // namespace gdrkit::twin
