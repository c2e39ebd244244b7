// What the environment says about the machine that the twins make up. Read once, at the first call of the library.
#pragma once

#include <cstdint>
#include <string>

namespace gdrkit::twin {

struct Config {
    std::string domain = "default";
    std::uint64_t seed = 0;
    unsigned nic_count = 2;
    unsigned gpu_count = 2;
    bool peermem = true;
    std::string fault_plan_path;
    unsigned late_us_max = 300;
    // Not empty when a variable or the fault plan was malformed; the line has been printed on stderr. Every entry that
    // can begin a session with the library (ibv_get_device_list, cuInit) must then fail.
    std::string error;
};

const Config& config();

// A random number generator of this process, seeded by the configuration and the pid; safe to call from every thread.
std::uint64_t random_u64();

// Sleeps between 0 and late_us_max microseconds, drawn by random_u64.
void be_late();

} // namespace gdrkit::twin
