// What the environment says about the machine that the twins make up. Read once, at the first call of the library.
#pragma once

#include <cstdint>
#include <string>

namespace gdrkit::twin {

enum class GaudiGeneration { gaudi, gaudi2, gaudi3 };

struct Config {
    std::string domain = "default";
    // A folder where queue pairs of several machines meet; empty: those of one network namespace alone.
    std::string fabric;
    std::uint64_t seed = 0;
    unsigned nic_count = 2;
    unsigned gpu_count = 2;
    unsigned gaudi_count = 2;
    GaudiGeneration gaudi = GaudiGeneration::gaudi2;
    // How much of the memory of a Gaudi lies in its PCI BAR, from the first byte on; 0: all of it.
    std::uint64_t gaudi_bar_mib = 0;
    bool peermem = true;
    bool udev = false; // udev knows every disk, whatever its database says
    std::string fault_plan_path;
    unsigned late_us_max = 300;
    // Not empty when a variable or the fault plan was malformed; the line has been printed on stderr. Every entry that
    // can begin a session with the library (ibv_get_device_list, cuInit) must then fail.
    std::string error;
};

const Config& config();

// A random number generator of this process, seeded by the configuration and the pid; safe to call from every thread.
std::uint64_t random_u64();

// Between 0 and late_us_max microseconds, drawn by random_u64.
std::uint64_t lateness_us();

// Sleeps that long.
void be_late();

} // namespace gdrkit::twin
