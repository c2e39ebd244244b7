// Small functions of the library that need no device: names of enumerators, conversions of rates, and files of sysfs.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>

#include "ibverbs/abi.hpp"
#include "ibverbs/session.hpp"

namespace {

struct Rate {
    ibv_rate rate;
    int mbps;
    // The rate as a multiple of 2.5 Gbit/s; 0 if the library defines no multiple for this rate.
    int multiple;
};

constexpr std::array rates = {
    Rate{IBV_RATE_2_5_GBPS, 2500, 1},     Rate{IBV_RATE_5_GBPS, 5000, 2},         Rate{IBV_RATE_10_GBPS, 10000, 4},
    Rate{IBV_RATE_20_GBPS, 20000, 8},     Rate{IBV_RATE_30_GBPS, 30000, 12},      Rate{IBV_RATE_40_GBPS, 40000, 16},
    Rate{IBV_RATE_60_GBPS, 60000, 24},    Rate{IBV_RATE_80_GBPS, 80000, 32},      Rate{IBV_RATE_120_GBPS, 120000, 48},
    Rate{IBV_RATE_14_GBPS, 14062, 0},     Rate{IBV_RATE_56_GBPS, 56250, 0},       Rate{IBV_RATE_112_GBPS, 112500, 0},
    Rate{IBV_RATE_168_GBPS, 168750, 0},   Rate{IBV_RATE_25_GBPS, 25781, 0},       Rate{IBV_RATE_100_GBPS, 103125, 0},
    Rate{IBV_RATE_200_GBPS, 206250, 0},   Rate{IBV_RATE_300_GBPS, 309375, 0},     Rate{IBV_RATE_28_GBPS, 28125, 11},
    Rate{IBV_RATE_50_GBPS, 53125, 20},    Rate{IBV_RATE_400_GBPS, 425000, 160},   Rate{IBV_RATE_600_GBPS, 637500, 240},
    Rate{IBV_RATE_800_GBPS, 850000, 320}, Rate{IBV_RATE_1200_GBPS, 1275000, 480},
};

constexpr std::array status_names = {"success",
                                     "local length error",
                                     "local QP operation error",
                                     "local EE context operation error",
                                     "local protection error",
                                     "Work Request Flushed Error",
                                     "memory management operation error",
                                     "bad response error",
                                     "local access error",
                                     "remote invalid request error",
                                     "remote access error",
                                     "remote operation error",
                                     "transport retry counter exceeded",
                                     "RNR retry counter exceeded",
                                     "local RDD violation error",
                                     "remote invalid RD request",
                                     "aborted error",
                                     "invalid EE context number",
                                     "invalid EE context state",
                                     "fatal error",
                                     "response timeout error",
                                     "general error",
                                     "TM error",
                                     "TM software rendezvous"};
static_assert(status_names.size() == IBV_WC_TM_RNDV_INCOMPLETE + 1);

constexpr std::array node_names = {"unknown",           "InfiniBand channel adapter",
                                   "InfiniBand switch", "InfiniBand router",
                                   "iWARP NIC",         "usNIC",
                                   "usNIC UDP",         "unspecified"};
static_assert(node_names.size() == IBV_NODE_UNSPECIFIED + 1);

constexpr std::array port_state_names = {"no state change (NOP)", "down", "init", "armed", "active", "active defer"};
static_assert(port_state_names.size() == IBV_PORT_ACTIVE_DEFER + 1);

constexpr std::array event_names = {"CQ error",
                                    "local work queue catastrophic error",
                                    "invalid request local work queue error",
                                    "local access violation work queue error",
                                    "communication established",
                                    "send queue drained",
                                    "path migrated",
                                    "path migration request error",
                                    "local catastrophic error",
                                    "port active",
                                    "port error",
                                    "LID change",
                                    "P_Key change",
                                    "SM change",
                                    "SRQ catastrophic error",
                                    "SRQ limit reached",
                                    "last WQE reached",
                                    "client reregistration",
                                    "GID table change",
                                    "WQ fatal"};
static_assert(event_names.size() == IBV_EVENT_WQ_FATAL + 1);

template <std::size_t Count> const char* name_at(const std::array<const char*, Count>& names, int index) {
    return index >= 0 && static_cast<std::size_t>(index) < Count ? names[static_cast<std::size_t>(index)] : "unknown";
}

} // namespace

extern "C" {

const char* ibv_wc_status_str(ibv_wc_status status) {
    return name_at(status_names, status);
}
const char* ibv_node_type_str(ibv_node_type node_type) {
    return name_at(node_names, node_type);
}
const char* ibv_port_state_str(ibv_port_state port_state) {
    return name_at(port_state_names, port_state);
}
const char* ibv_event_type_str(ibv_event_type event) {
    return name_at(event_names, event);
}

int ibv_rate_to_mult(ibv_rate rate) {
    for (const Rate& entry : rates) {
        if (entry.rate == rate && entry.multiple != 0) {
            return entry.multiple;
        }
    }
    return -1;
}

ibv_rate mult_to_ibv_rate(int mult) {
    for (const Rate& entry : rates) {
        if (entry.multiple == mult && mult != 0) {
            return entry.rate;
        }
    }
    return IBV_RATE_MAX;
}

int ibv_rate_to_mbps(ibv_rate rate) {
    for (const Rate& entry : rates) {
        if (entry.rate == rate) {
            return entry.mbps;
        }
    }
    return -1;
}

ibv_rate mbps_to_ibv_rate(int mbps) {
    for (const Rate& entry : rates) {
        if (entry.mbps == mbps) {
            return entry.rate;
        }
    }
    return IBV_RATE_MAX;
}

// The twin accesses memory regions through the page tables of the process, so a fork needs no preparation.
int ibv_fork_init(void) {
    const auto fault = gdrkit::twin::verbs::find_injected_fault("ibv_fork_init");
    return fault ? *fault : 0;
}

ibv_fork_status ibv_is_fork_initialized(void) {
    return IBV_FORK_UNNEEDED;
}

// librdmacm and old programs import these functions, which no public header declares.
[[gnu::visibility("default")]] int ibv_dontfork_range(void*, std::size_t) {
    return 0;
}
[[gnu::visibility("default")]] int ibv_dofork_range(void*, std::size_t) {
    return 0;
}

[[gnu::visibility("default")]] const char* ibv_get_sysfs_path(void) {
    // Like the real library, ignore the environment of a set-uid program.
    static const std::string* const path = [] {
        const char* const configured_path = getuid() == geteuid() ? std::getenv("SYSFS_PATH") : nullptr;
        auto* const sysfs_path = new std::string(configured_path != nullptr ? configured_path : "/sys");
        while (sysfs_path->size() > 1 && sysfs_path->ends_with('/')) {
            sysfs_path->pop_back();
        }
        return sysfs_path;
    }();
    return path->c_str();
}

// Read a file of sysfs without its final newline. Return the length, or -1 with errno set.
[[gnu::visibility("default")]] int ibv_read_sysfs_file(const char* dir, const char* file, char* buf,
                                                       std::size_t size_bytes) {
    const int fd = open((std::string(dir) + "/" + file).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    ssize_t length = read(fd, buf, size_bytes);
    const int error = errno;
    close(fd);
    if (length < 0) {
        errno = error;
        return -1;
    }
    if (length > 0 && buf[length - 1] == '\n') {
        buf[--length] = '\0';
    } else if (static_cast<std::size_t>(length) < size_bytes) {
        buf[length] = '\0';
    } else {
        errno = EINVAL; // The text would have no zero at its end.
        return -1;
    }
    return static_cast<int>(length);
}

} // extern "C"
