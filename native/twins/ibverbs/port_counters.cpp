// Maps the file of the port counters, and counts packets and their headers.

#include "ibverbs/port_counters.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "loader/tree_files.hpp"
#include "model/sockets.hpp"
#include "model/usage.hpp"

namespace gdrkit::twin::verbs {
namespace {

// The twin sends no packets. The port counters show the packets that RoCE v2 over IPv6 with a path MTU of 4096 bytes
// would send. A packet has the headers Ethernet (14 bytes), IPv6 (40), UDP (8), BTH (12) and ICRC (4). The counters
// leave out acknowledgements and the further headers of some operations, which are below 1 % of a large transfer.
constexpr std::uint64_t mtu_bytes = 4096;
constexpr std::uint64_t header_bytes = 14 + 40 + 8 + 12 + 4;

// Return the counters of all devices of the domain, or nullptr if the environment variable of the state folder is not
// set or the file is unusable.
PortCounters* map_counters() {
    const char* const state_folder = std::getenv(state_folder_variable);
    if (state_folder == nullptr) {
        return nullptr;
    }
    const Fd fd(open((std::string(state_folder) + counters_file_name).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    struct stat status {};
    if (!fd || fstat(fd.get(), &status) != 0 || status.st_size != static_cast<off_t>(counters_file_bytes)) {
        return nullptr;
    }
    void* const memory = mmap(nullptr, counters_file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    return memory == MAP_FAILED ? nullptr : static_cast<PortCounters*>(memory);
}

void add_to_counter(std::uint64_t* counter, std::uint64_t count) {
    std::atomic_ref(*counter).fetch_add(count, std::memory_order_relaxed);
}

} // namespace

void PayloadCounter::operator+=(std::uint64_t length_bytes) {
    add_without_port(length_bytes);
    if (side_ == Side::requester) {
        record_bytes(length_bytes);
    }
    count_at_port(device_index_, direction_, length_bytes);
}

void count_at_port(unsigned device_index, PortDirection direction, std::uint64_t length_bytes) {
    static PortCounters* const counters = map_counters();
    if (counters == nullptr || device_index >= max_devices) {
        return;
    }
    PortCounters& port = counters[device_index];
    const std::uint64_t packet_count = std::max<std::uint64_t>((length_bytes + mtu_bytes - 1) / mtu_bytes, 1);
    const std::uint64_t port_bytes = length_bytes + packet_count * header_bytes;
    add_to_counter(direction == PortDirection::sent ? &port.sent_bytes : &port.received_bytes, port_bytes);
    add_to_counter(direction == PortDirection::sent ? &port.sent_packets : &port.received_packets, packet_count);
}

} // namespace gdrkit::twin::verbs
